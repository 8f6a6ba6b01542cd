"""The heads of `heads.yaml` for one base: fields that follow from its sizes are filled in, and all are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from drafter.errors import LoadError
from drafter.heads.checkpoint import HEADS
from drafter.heads.config import head_config
from pipeline.errors import InputError
from recipes.paper.paper_config import HERE, PaperConfig


@dataclass(frozen=True)
class HeadRecipe:
    """An entry of `heads.yaml`.

    Args:
        algorithm: The head's algorithm.
        head: Fields of its configuration.
        more_frames: How many frames a CTC head has beyond the depth.
    """

    algorithm: str
    head: dict[str, Any] = field(default_factory=dict)
    more_frames: int = 0


@cache
def read_recipes() -> dict[str, HeadRecipe]:
    """Return the entries of `heads.yaml` by name."""
    entries = yaml.safe_load((HERE / "heads.yaml").read_text(encoding="utf-8"))
    return {name: HeadRecipe(**entry) for name, entry in entries.items()}


def head_settings(config: PaperConfig, name: str) -> tuple[str, dict[str, Any]]:
    """Return a head's algorithm and the fields of its configuration, but for those that the base decides.

    Where an algorithm has attention or an MLP, its numbers of heads and its inner width are those of a layer of the
    base; a CTC head's joint network is as wide as the base.

    Raises:
        InputError: There is no such head, or a field is not allowed.
    """
    recipes, base = read_recipes(), config.base
    if name not in recipes:
        raise InputError(f"heads names {name!r}: recipes/paper/heads.yaml has {', '.join(recipes)}")
    recipe = recipes[name]
    follows = {
        "depth": config.depth,
        "num_frames": config.depth + recipe.more_frames,
        "num_heads": base.heads,
        "intermediate_size": base.intermediate,
        "joint_size": base.width,
        "inner_size": base.intermediate,
    }
    known = {one.name for one in dataclasses.fields(HEADS[recipe.algorithm].config_class)}
    fields = {key: value for key, value in follows.items() if key in known} | recipe.head | config.heads[name]
    full_config(config, name, recipe.algorithm, fields)
    return recipe.algorithm, fields


def full_config(config: PaperConfig, name: str, algorithm: str, fields: dict[str, Any]) -> Any:
    """Return a head's configuration for the base.

    Raises:
        InputError: A field is not allowed.
    """
    base, head = config.base, HEADS[algorithm]
    sizes = {"hidden_size": base.width, "vocab_size": base.vocabulary}
    try:
        return head_config(name, head.config_class, {**head.defaults(base.layers), **fields, **sizes})
    except LoadError as error:
        raise InputError(f"heads: {error}") from error
