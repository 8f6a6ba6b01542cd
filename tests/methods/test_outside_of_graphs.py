"""What steps on a GPU leave outside of their CUDA graphs, by kind of row: docs/gpu.md has the counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.marks import slow_but
from tests.support.step_counts import KINDS, counted

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
FAST = ["drafts of a head, log-probabilities", "drafts of a head, with a guide", "a device's draft in each step"]


@pytest.mark.parametrize("name", slow_but(FAST, list(KINDS)))
def test_the_page_says_what_is_outside_and_how_often_the_host_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    _, _, operations, waits, *_ = (cell.strip() for cell in line.split("|"))
    found = counted(name, monkeypatch)
    assert found == (int(operations), int(waits))
    assert found[1] <= 2
