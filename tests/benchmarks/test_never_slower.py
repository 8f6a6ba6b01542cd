from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.never_slower import AUTO, PLAIN, RECORD_FILE, TABLE_FILE, Cell, main, ratios


def test_gamma_is_a_median_of_ratios_within_a_round() -> None:
    rates = {PLAIN: [100, 50, 100], AUTO: [150, 60, 90]}
    cells = [
        Cell(name, "chat", 1, 8, turn, rate, 1.0, 0.0, 0.0) for name in rates for turn, rate in enumerate(rates[name])
    ]
    assert ratios(cells) == {AUTO: 1.2}


def test_a_small_measurement_is_written_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = "--cells 2x2 --rounds 1 --max-new-tokens 8 --kinds records random --neighbour"
    main(["--output", str(tmp_path), *given.split()])
    cells = json.loads((tmp_path / RECORD_FILE).read_text())["cells"]
    assert [(cell["kind"], cell["drafter"]) for cell in cells] == [
        (kind, name) for kind in ("records", "random") for name in (AUTO, PLAIN)
    ]
    assert "| records" in (tmp_path / TABLE_FILE).read_text()
