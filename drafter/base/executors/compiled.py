"""The base's forward compiled by torch.compile: the same sums in fewer operations."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from drafter.base.executors.contract import Executor

_VARIANTS = 64
"""Compiled variants that are kept. Each size of engine in a process has its own; past the limit they run uncompiled."""


def compiled(executor: Executor) -> Executor:
    """Compile a forward for this machine.

    The first call for one row and for several, of one node and of several, compiles for a while; a compiler's error is
    raised there.
    """
    options: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _VARIANTS
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    return torch.compile(executor, dynamic=True, **options)
