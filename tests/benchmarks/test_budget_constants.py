from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import budget_constants
from benchmarks.budget_constants import RECORD_FILE, TABLE_FILE, Scenario, compared, constants, main, others


def test_constants_are_changed_both_ways_and_all_but_switched_off() -> None:
    assert others(8) == [1, 4, 16]
    assert others(2) == [1, 4]
    assert others(0.5) == [1e-6, 0.25, 1.0]
    assert {"adaptive._SHARE", "worth._PACE"} <= constants().keys()


def test_the_slowest_and_the_fastest_world_are_named() -> None:
    change = compared("one", 1.0, 2.0, {"a": 2.0, "b": 1.0, "c": 4.0}, {"a": 1.0, "b": 1.0, "c": 5.0})
    assert (change.slowest, change.slowest_world, change.fastest, change.fastest_world) == (0.5, "a", 1.25, "c")
    assert change.mean == pytest.approx((0.5 + 1.0 + 1.25) / 3)


def test_every_constant_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_constants, "SCENARIOS", (Scenario("one", (0.1,), ((0.9,),), steps=30, rows=(1,)),))
    main(["--output", str(tmp_path), "--seeds", "1"])
    record = json.loads((tmp_path / RECORD_FILE).read_text(encoding="utf-8"))
    assert record["speeds"]["one, 1 rows"] > 1.5
    assert {change["constant"] for change in record["changes"]} == constants().keys()
    table = (tmp_path / TABLE_FILE).read_text(encoding="utf-8")
    assert all(f"`{name}`" in table for name in constants())
