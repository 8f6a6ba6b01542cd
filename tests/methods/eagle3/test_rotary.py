""""""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafter.heads.frame_head import rotary_rates, rotate, rotation_table
from drafter.methods.eagle3.head import scaled_rates

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_positions_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size, length = 16, 40
    parameters = {"rope_type": "default", "rope_theta": 500.0, **scaling}
    config = LlamaConfig(hidden_size=2 * size, num_attention_heads=2, rope_parameters=parameters)
    heads = torch.randn(1, 2, length, size)
    expected, _ = apply_rotary_pos_emb(heads, heads, *LlamaRotaryEmbedding(config)(heads, torch.arange(length)[None]))
    rates = scaled_rates(rotary_rates(500.0, size, torch.device("cpu")), scaling)
    cos, sin = rotation_table(rates, length, torch.float32).unbind(1)
    assert torch.allclose(rotate(heads, cos, sin), expected, atol=1e-5)
