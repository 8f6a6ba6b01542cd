"""Memory that runs out at chosen calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch


def run_out(function: Callable[..., Any], calls: Collection[int], *, late: bool = False) -> Callable[..., Any]:
    """Return `function`, out of memory at these of its calls, counted from 1, before or after it has done its work."""
    count = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = function(*args, **kwargs) if late or count not in calls else None
        if count in calls:
            raise torch.OutOfMemoryError("no memory")
        return result

    return failing
