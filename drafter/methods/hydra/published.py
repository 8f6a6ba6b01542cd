"""Hydra heads in the format of zankner/Hydra, without prefix attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafter.errors import LoadError, shown
from drafter.heads.published import Json, Layout, PublicHead, count, refuse_other_base
from drafter.target.model import BaseModel


def is_hydra(config: Json) -> bool:
    """Recognise the `config.json` of published Hydra heads."""
    return "hydra_num_heads" in config


def read_hydra(name: str, config: Json, tensors: dict[str, Tensor], base: BaseModel) -> PublicHead:
    """Return published heads from their `config.json` and weights; `name` is for messages.

    Raises:
        LoadError: They belong to another target model, or are of an unsupported kind.
    """
    for key, usual, wanted in (
        ("hydra_head_arch", "mlp", "mlp"),
        ("grounded_heads", False, True),
        ("hidden_state_offset", 0, 0),
    ):
        if config.get(key, usual) != wanted:
            raise LoadError(
                f"draft head {name!r} has {key} = {shown(config.get(key, usual))}, and only {wanted!r} can be run"
            )
    depth, layers = count(name, config, "hydra_num_heads"), count(name, config, "hydra_num_layers", 1)
    names: dict[str, str] = {}
    for head in range(depth):
        for part in ("weight", "bias"):
            mlp = f"hydra_mlp.{head}"
            names[f"heads.{head}.residual.{part}"] = f"{mlp}.0.res_connection.{part}"
            names[f"heads.{head}.first.{part}"] = f"{mlp}.0.linear.{part}"
            names |= {f"heads.{head}.layers.{i}.{part}": f"{mlp}.{i + 1}.linear.{part}" for i in range(layers - 1)}
            names[f"outputs.{head}.{part}"] = f"hydra_lm_head.{head}.{part}"
    if missing := [one for one in names.values() if one not in tensors]:
        raise LoadError(f"draft head {name!r}: tensor {missing[0]!r} is missing from its weights")
    vocabulary, width = tensors["hydra_lm_head.0.weight"].shape
    made_for = config.get("base_model_name_or_path")
    sizes = {"hidden_size": width, "vocab_size": vocabulary}
    refuse_other_base(name, base, made_for, sizes)
    fields: dict[str, Any] = {**sizes, "depth": depth, "num_layers": layers, "own_outputs": True}
    found = {ours: tensors[theirs] for ours, theirs in names.items()}
    return PublicHead("Hydra", "hydra", fields, found, made_for)


LAYOUT = Layout("hydra", is_hydra, read_hydra)
