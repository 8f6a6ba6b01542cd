"""The base's forward compiled by torch.compile: the same sums in fewer operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_VARIANTS = 64
"""Compiled variants that are kept. Each size of engine in a process has its own; past the limit they run uncompiled."""


def compiled(forward: F) -> F:
    """Compile a forward for this machine.

    The first call for one row and for several, of one node and of several, compiles for a while; a compiler's error is
    raised there.
    """
    options: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _VARIANTS
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    return torch.compile(forward, dynamic=True, **options)  # type: ignore[return-value]
