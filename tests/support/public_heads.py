"""Weights and inputs by a formula, of which public code has made the numbers that tests compare with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.target_model.model import BaseModel


def formula(name: str, shape: Sequence[int]) -> Tensor:
    """Return the numbers of a tensor; those of norms are around 1."""
    phase = sum(map(ord, name)) % 97
    waves = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase)
    return (1.0 + 0.3 * waves if "norm" in name else 0.4 * waves).float().view(*shape)


def base_with_embeddings(vocab_size: int, width: int, layers: int = 3) -> BaseModel:
    """Return a random base whose token embeddings are those of the formula."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(formula("embed_tokens.weight", (vocab_size, width)))
    return BaseModel(model, "the base")


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], weights: str = "model.safetensors"
) -> Path:
    """Write a published head's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / weights)
    return folder
