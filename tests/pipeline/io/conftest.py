"""Files that these tests write are read in this process: another one takes a second to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of hostile files set `Apart` again."""

    def here(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return lambda *arguments, what: function(*arguments)

    for module in ("listing", "splits"):
        monkeypatch.setattr(f"pipeline.io.{module}.Apart", here)
