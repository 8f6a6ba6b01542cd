"""Medusa heads in the formats of FasterDecoding/Medusa and vLLM."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from drafter.errors import LoadError
from drafter.heads.published import Json, Layout, PublicHead, TargetOfExport, count, refuse_other_base
from drafter.methods.medusa.head import MedusaHeadConfig
from drafter.target.model import BaseModel


def is_medusa(config: Json) -> bool:
    """Recognise the `config.json` of published Medusa heads."""
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def read_medusa(name: str, config: Json, tensors: dict[str, Tensor], base: BaseModel) -> PublicHead:
    """Return published heads from their `config.json` and weights; `name` is for messages.

    Raises:
        LoadError: They belong to another target model, or are of an unsupported kind.
    """
    published = "medusa_num_heads" in config
    depth = count(name, config, "medusa_num_heads" if published else "num_heads")
    layers = count(name, config, "medusa_num_layers" if published else "num_hidden_layers", 1)
    if layers != 1:
        raise LoadError(f"draft head {name!r} has {layers} residual blocks a head, and only one can be run")
    tensors = {key.removeprefix("medusa_head.").removeprefix("medusa_heads."): one for key, one in tensors.items()}
    block, bias, output = names(published)
    # The configuration of FasterDecoding's first heads says two, but there are five.
    there = {place[1] for key in tensors if (place := re.match(r"(?:blocks\.)?(\d+)\.", key))}
    depth = max(depth, len(there))
    if output.format(0) not in tensors and block.format(0) in tensors:
        raise LoadError(
            f"draft head {name!r} has no output layers: it takes the target model's LM head, and only heads with "
            "output layers of their own can be run"
        )
    wanted = [part.format(head) for head in range(depth) for part in (block, output)]
    if missing := [one for one in wanted if one not in tensors]:
        raise LoadError(f"draft head {name!r}: tensor {missing[0]!r} is missing from its weights")
    first = tensors[output.format(0)]
    tokens = tensors.get("token_map")
    made_for = config.get("base_model_name_or_path")
    vocabulary = len(first) if tokens is None else count(name, config, "vocab_size")
    sizes = {"hidden_size": first.shape[1], "vocab_size": vocabulary}
    refuse_other_base(name, base, made_for, sizes)
    fields: dict[str, Any] = {**sizes, "depth": depth, "draft_vocab_size": None if tokens is None else len(tokens)}
    found = {f"module.blocks.{head}.weight": tensors[block.format(head)] for head in range(depth)}
    for head in range(depth):
        zeros = first.new_zeros(first.shape[1])
        found[f"module.blocks.{head}.bias"] = tensors.get(bias.format(head), zeros)
    found["outputs"] = torch.stack([tensors[output.format(head)] for head in range(depth)])
    if tokens is not None:
        found["vocabulary.tokens"] = tokens.long()
    return PublicHead("Medusa" if published else "vLLM", "medusa", fields, found, made_for)


def names(published: bool) -> tuple[str, str, str]:
    """Return name patterns of a head's block, its bias and its output layer."""
    if published:
        return "{0}.0.linear.weight", "{0}.0.linear.bias", "{0}.1.weight"
    return "blocks.{0}.layers.0.weight", "blocks.{0}.layers.0.bias", "lm_heads.{0}.weight"


def _export(
    shape: MedusaHeadConfig, tensors: dict[str, Tensor], base: TargetOfExport
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


LAYOUT = Layout("medusa", is_medusa, read_medusa, export=_export)
