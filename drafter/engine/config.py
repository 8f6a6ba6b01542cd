"""Settings of an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafter.errors import LoadError, shown, unknown_setting

DEFAULT_MAX_LENGTH = 2048  # most prompt and output tokens of a request where no other number is set


@dataclass(frozen=True)
class EngineSettings:
    """A user's settings of an engine; the jobs and the endpoint share them.

    Args:
        max_num_seqs: Requests decoded together.
        max_model_len: Most prompt and output tokens of a request; by default the model's own limit, at most 2,048.
        num_draft_tokens: Draft tokens verified in a step; `auto` adapts to what pays on the machine.
        compile: Compile the model's forward with torch.compile: a minute or two at start, less after the first time,
            for faster steps.
        kv_gib: GiB that the KV cache may take: rows then take memory as they grow, and `max_num_seqs` may be more than
            would fit at full length. By default each sequence has memory for `max_model_len` tokens.
        kept_rows: Requests that have ended and whose state stays in memory, so that later prompts that begin alike
            need not be read again; by default 16, or fewer where memory is short, and on a GPU up to `max_num_seqs`.
        tensor_parallel_size: Processes that each have a part of the target model's weights and of its KV cache; on a
            machine with GPUs each takes one.

    Raises:
        ValueError: A value is of the wrong type or out of range.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    num_draft_tokens: int | Literal["auto"] = "auto"
    compile: bool = False
    kv_gib: float | None = None
    kept_rows: int | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _check_integer("max_num_seqs", self.max_num_seqs, 1)
        _check_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > 1 and self.compile:
            raise ValueError("compile and tensor_parallel_size do not go together: leave one of them out")
        if self.max_model_len is not None:
            _check_integer("max_model_len", self.max_model_len, 2)
        if self.kept_rows is not None:
            _check_integer("kept_rows", self.kept_rows, 0)
        if self.num_draft_tokens != "auto":
            _check_integer("num_draft_tokens", self.num_draft_tokens, 0)
        if self.kv_gib is not None and (type(self.kv_gib) not in (int, float) or not 0 < self.kv_gib < math.inf):
            raise ValueError(f"kv_gib must be a number above 0, not {self.kv_gib!r}")

    @property
    def kv_bytes(self) -> int | None:
        """Bytes that the KV cache may take; None for what all slots of full length take."""
        return None if self.kv_gib is None else int(self.kv_gib * 2**30)

    @property
    def longest(self) -> int:
        """Most prompt and output tokens of a request; a model with fewer positions takes fewer."""
        return self.max_model_len or DEFAULT_MAX_LENGTH


@dataclass(frozen=True)
class EngineConfig(EngineSettings):
    """Settings of an engine and of its queue.

    Args:
        max_queue: Requests that may wait for a slot.
    """

    max_queue: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer("max_queue", self.max_queue, 1)


def engine_config(config: EngineConfig | Mapping[str, Any] | None, changes: Mapping[str, Any]) -> EngineConfig:
    """Return an engine's configuration, with some fields changed; raise `LoadError` for one that cannot be used."""
    given = {} if config is None else vars(config) if isinstance(config, EngineConfig) else config
    if not isinstance(given, Mapping):
        raise LoadError(f"config must be an EngineConfig or a mapping of its fields, not {shown(config)}")
    chosen = {**given, **changes}
    if problem := unknown_setting(chosen, EngineConfig):
        raise LoadError(problem)
    try:
        return EngineConfig(**chosen)
    except ValueError as error:
        raise LoadError(str(error)) from error


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
