"""Models with recurrent layers: the patterns of layers of those that are published, small and random."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.target_model.architecture import transformers_loading
from drafter.target_model.model import BaseModel
from tests.support.models import DEVICE, EOS, VOCABULARY

_L, _F, _C = "linear_attention", "full_attention", "conv"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
# Heads' values and keys fill vectors of any processor, as the native library wants them.
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_L, _L, _L, _F],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "layer_types": [_C, _C, _F, _C], "block_auto_adjust_ff_dim": False},
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "granitemoehybrid": _MAMBA2
    | {"num_hidden_layers": 4, "layer_types": [_L, _L, _F, _L], "num_local_experts": 4, "shared_intermediate_size": 48},
    "falcon_h1": _MAMBA2 | {"num_hidden_layers": 3, "mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": [_L, "mlp", _L, _F, "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "bamba": _MAMBA2 | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "lfm2_moe": _EXPERTS | {"num_hidden_layers": 4, "layer_types": [_C, _C, _F, _C], "num_dense_layers": 2},
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layer_types": [_L, _L, _L, _F],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": [_L, "hybrid", _L, _L, "hybrid", _L],
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "adapter_rank": 8,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "mamba2": {"num_hidden_layers": 3, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "mamba": {"num_hidden_layers": 3, "state_size": 8},
}
"""Settings by transformers' `model_type`; the first ones have the kinds of layers that differ most."""


@torch.inference_mode(False)  # as in `random_model`
def hybrid_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A random causal LM of a family with recurrent layers, with other `settings` than its usual ones."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **HYBRIDS[family], **settings})
    with transformers_loading():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large weights, so that a greedy text is not one token for ever.
            if parameter.dim() > 1 and not name.endswith("A_log"):
                parameter.mul_(3)
            if "conv" in name:
                torch.nn.init.normal_(parameter, std=0.4)
    return model


@cache
def hybrid_base(family: str) -> BaseModel:
    """The target model of a family, made and proved once for all tests; the proof's trees have decoys."""
    with torch.inference_mode(False):
        return BaseModel(hybrid_model(family))
