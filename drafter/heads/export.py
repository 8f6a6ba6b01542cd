"""A head of ours in the layout that vLLM reads: EAGLE-3 as speculators writes it, Medusa as vLLM's loader has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.errors import LoadError
from drafter.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from drafter.heads.config import head_config
from drafter.methods.eagle3.config import Eagle3HeadConfig
from drafter.methods.eagle3.published import theirs
from drafter.methods.medusa.head import MedusaHeadConfig
from drafter.methods.medusa.published import names

_EXPORTED: dict[str, type] = {"eagle3": Eagle3HeadConfig, "medusa": MedusaHeadConfig}
_SPECULATORS = "0.9.0"
"""Version whose configuration is written."""


@dataclass(frozen=True)
class BaseOfExport:
    """What an exported head says of its base.

    Args:
        name: Hub id or path.
        architectures: Of its configuration.
        max_positions: Longest sequence, if its configuration says.
        embeddings: `[V, d]` its token embeddings. An EAGLE-3 head has a copy: without it speculators 0.9 may leave them
            to chance, though vLLM would take the base's.
    """

    name: str
    architectures: Sequence[str]
    max_positions: int | None = None
    embeddings: Tensor | None = None


def export_head(source: Path, target: Path, base: BaseOfExport) -> None:
    """Write the head of a folder into another, in the layout that vLLM reads.

    Args:
        source: A folder that `save_head` has written.
        target: Where to write; it exists.
        base: The head's base.

    Raises:
        LoadError: The head is of an algorithm or of a kind that the layout does not have.
    """
    saved = json.loads((source / CONFIG_FILE).read_bytes())
    shape = exportable(saved["algorithm"], saved["head"])
    tensors = load_file(source / WEIGHTS_FILE)
    if isinstance(shape, Eagle3HeadConfig):
        config, tensors = _eagle3(shape, tensors, base)
    else:
        config, tensors = _medusa(shape, tensors, base)
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / WEIGHTS_FILE, {"format": "pt"})
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def exportable(algorithm: str, fields: Mapping[str, Any]) -> Eagle3HeadConfig | MedusaHeadConfig:
    """Return the configuration of a head that can be exported.

    Raises:
        LoadError: It cannot be.
    """
    if algorithm not in _EXPORTED:
        raise LoadError(
            f"heads of algorithm {algorithm!r} have no layout that others read; {', '.join(_EXPORTED)} have"
        )
    shape = head_config(algorithm, _EXPORTED[algorithm], fields)
    if isinstance(shape, Eagle3HeadConfig) and (len(shape.hidden_layers) != 3 or min(shape.hidden_layers) < 0):
        raise LoadError(
            f"an exported EAGLE-3 head reads the outputs of three layers, and this one hidden_layers "
            f"{list(shape.hidden_layers)}: train it with three, counted from 0"
        )
    return shape  # type: ignore[no-any-return]


def _eagle3(
    shape: Eagle3HeadConfig, tensors: dict[str, Tensor], base: BaseOfExport
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layer = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", **(shape.rope_scaling or {}), "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if base.max_positions is not None:
        layer["max_position_embeddings"] = base.max_positions
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.depth}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.name, "architectures": list(base.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        # The states between layers are counted there, the embeddings being 0.
        "eagle_aux_hidden_state_layer_ids": [one + 1 for one in shape.hidden_layers],
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.fusion_norm == "whole",
        "fc_norm": shape.fusion_norm == "each",
        "norm_output": shape.norm_output,
        "tie_word_embeddings": False,
    }
    heads, kv_heads = shape.num_heads * shape.head_width, shape.kv_heads * shape.head_width
    rows = {"layer.qkv.weight": [heads, kv_heads, kv_heads], "layer.gate_up.weight": [shape.intermediate_size] * 2}
    found = {
        one: part
        for ours, parts in theirs(shape, "layers.0.").items()
        for one, part in zip(parts, tensors[ours].split(rows.get(ours, len(tensors[ours]))), strict=True)
    }
    if base.embeddings is not None:
        found["embed_tokens.weight"] = base.embeddings.to(tensors["norm.weight"].dtype)
    if shape.draft_vocab_size is not None:
        tokens = tensors["vocabulary.tokens"]
        found["d2t"] = tokens - torch.arange(len(tokens))
        found["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return config, found


def _medusa(
    shape: MedusaHeadConfig, tensors: dict[str, Tensor], base: BaseOfExport
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": base.name,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.depth,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "truncated_vocab_size": shape.draft_vocab_size or shape.vocab_size,
    }
    block, bias, output = names(published=False)
    found = {}
    for head in range(shape.depth):
        found[block.format(head)] = tensors[f"module.blocks.{head}.weight"]
        found[bias.format(head)] = tensors[f"module.blocks.{head}.bias"]
        found[output.format(head)] = tensors["outputs"][head].clone()
    if shape.draft_vocab_size is not None:
        found["token_map"] = tensors["vocabulary.tokens"]
    return config, found
