"""Files and configurations of draft heads, and how to build a configuration from untrusted values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drafter.errors import LoadError, first_line
from drafter.json_fields import from_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

Tree = Literal["exact", "chain", "static"]
"""The best draft tree under the head's distributions, its most probable path alone, or the published fixed tree."""

MOST_DEPTH = 256
"""Levels of a draft tree. Buffers are allocated for the depth that a configuration claims, and no tensor proves it."""


@dataclass(frozen=True)
class HeadConfig:
    """Fields that most heads have.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        depth: U, number of target tokens in training and of levels of a tree.
        depth_decay: Weight of a token's loss relative to the token before it.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.
    """

    hidden_size: int
    vocab_size: int
    depth: int = field(default=6, kw_only=True)
    depth_decay: float = field(default=0.8, kw_only=True)
    draft_vocab_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "depth")
        size, whole = self.draft_vocab_size, self.vocab_size
        if size is not None and not 1 <= size <= whole:
            raise ValueError(f"draft_vocab_size must be from 1 to the size of the vocabulary, {whole}, not {size}")


def check_sizes(config: Any, *names: str) -> None:
    """Raise `ValueError` for the first of the fields `names` that is below 1, or for a `depth` that no tree has."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
        if name == "depth" and config.depth > MOST_DEPTH:
            raise ValueError(f"depth must be at most {MOST_DEPTH}, not {config.depth}")


def check_even_heads(config: Any) -> None:
    """Raise `ValueError` unless `hidden_size` splits into `num_heads` heads of even width, as rotary positions need."""
    if config.hidden_size % (2 * config.num_heads):
        raise ValueError(f"hidden_size {config.hidden_size} does not split into {config.num_heads} heads of even width")


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file that appears complete or not at all: `write` makes another one beside it, which is renamed."""
    partial = target.with_name(f"{target.name}.partial")
    try:
        write(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def head_config(name: str, config_class: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass `config_class`. Types must match exactly, but an integer will do for a float.

    Raises `LoadError` if a field is unknown, missing or has an invalid value.
    """
    try:
        told = json.loads(json.dumps(dict(values), default=str, allow_nan=False))
    except (RecursionError, TypeError, ValueError) as error:
        raise LoadError(f"draft head {name!r}: its configuration cannot be read: {first_line(error)}") from error
    try:
        return from_json(config_class, told)
    except ValueError as error:
        raise LoadError(f"draft head {name!r}: {first_line(error)}") from error
    except (ArithmeticError, AttributeError, RuntimeError, TypeError) as error:
        # Of a type that a check of the class does not expect.
        raise LoadError(f"draft head {name!r}: its configuration cannot be read: {first_line(error)}") from error
