"""What the measurement and a measured process say to each other: a line of JSON each.

Every engine's environment imports this, so it needs nothing beyond the standard library.

First the process says that it is ready, and with which versions. Then each `Work` it reads is answered by a `Done`. An
answer with the key `error` says what failed instead, and is the last one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Settings:
    """What an engine is started with.

    Args:
        model: Folder of the model, as transformers has it, or a GGUF file.
        dtype: `float32` or `bfloat16`, of weights, arithmetic and KV cache.
        variant: How it decodes: `plain`, or the name of a way to speculate.
        batch: How many prompts are decoded together at most.
        longest: Most tokens of a prompt and its text.
        ends: Tokens that end a text.
        threads: Threads to compute with.
        folder: Where it may keep the model in a form of its own.
    """

    model: str
    dtype: str
    variant: str
    batch: int
    longest: int
    ends: list[int]
    threads: int
    folder: str


@dataclass(frozen=True)
class Work:
    """Prompts to decode greedily.

    Args:
        prompts: Their tokens.
        max_new_tokens: Most new tokens of each.
        schemas: The JSON schema of each answer, as text; none if they are free.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    schemas: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """What came of it.

    Args:
        seconds: From the first prompt's start to the last text's end.
        tokens: New tokens of each prompt, in order.
        peak_bytes: Most memory that the process had resident meanwhile.
        steps: As in `Decoded`.
    """

    seconds: float
    tokens: list[list[int]]
    peak_bytes: int
    steps: int | None = None


@dataclass(frozen=True)
class Decoded:
    """New tokens of each prompt, in order, and how many steps gave them, over all prompts; None if it is not told."""

    tokens: list[list[int]]
    steps: int | None = None


Decode = Callable[[Work], Decoded]
"""Decodes some work."""


def serve(load: Callable[[Settings], Decode], packages: Sequence[str]) -> None:
    """Be a measured process, with the settings in the first argument, until there is no more work.

    Args:
        load: Loads the engine.
        packages: Those whose versions matter.
    """
    stream = _own_output()
    try:
        decode = load(Settings(**json.loads(sys.argv[1])))
        _say(stream, {"versions": {name: version(name) for name in packages}})
        for line in sys.stdin:
            _say(stream, asdict(measured(decode, Work(**json.loads(line)))))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        _say(stream, {"error": f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"})
        raise


def measured(decode: Decode, work: Work) -> Done:
    """Decode, and take time and memory."""
    _forget_peak()
    start = time.perf_counter()
    decoded = decode(work)
    return Done(time.perf_counter() - start, decoded.tokens, _peak_bytes(), decoded.steps)


def _own_output() -> TextIO:
    """Return the standard output, and send all that others write there to the standard error instead."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _say(stream: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=stream, flush=True)


def _forget_peak() -> None:
    """Let the peak of resident memory begin anew, where Linux allows it."""
    try:
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # The peak is then that of the process so far.


def _peak_bytes() -> int:
    """Return the peak of resident memory. `ru_maxrss` would begin with that of the process that started this one."""
    lines = (_PROCESS / "status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
