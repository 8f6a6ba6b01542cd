from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.records.__main__ import RECORD_FILE, TABLE_FILE, main
from benchmarks.records.measuring import FREE, PLAIN, Cell, Share
from benchmarks.records.tables import page, ratio
from benchmarks.records.texts import SCHEMAS, tasks
from drafter.embedded import EMBEDDED_BASE


def test_tasks_follow_from_their_seed_and_have_valid_schemas() -> None:
    assert tasks(8) == tasks(8)[:8] == tasks(12)[:8]
    assert tasks(8) != tasks(8, seed=1)
    assert [one.kind for one in tasks(5)] == [*SCHEMAS, "person"]
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_a_ratio_is_a_median_within_rounds() -> None:
    rates = {PLAIN.name: [100, 50, 100], FREE.name: [150, 60, 90]}
    cells = [Cell(arm, 1, turn, 1.0, 4, 4, rate) for arm in rates for turn, rate in enumerate(rates[arm])]
    assert ratio(cells, FREE.name, PLAIN.name) == 1.2


def test_another_engine_is_told_by_its_records_alone() -> None:
    environment: dict[str, Any] = {
        "hardware": {"gpu": None, "processor": "CPU", "cores": 2},
        "base": {"parameters": 5},
        "versions": {},
    }
    environment |= dict.fromkeys(("threads", "dtype", "command", "commit", "uncommitted_changes", "date"))
    environment["base"] = {"parameters": 5}
    cells = [Cell(PLAIN.name, 1, 0, 1.0, 4, 4, 100, steps=50), Cell("another", 1, 0, 2.0, 4, 3, 120)]
    record: dict[str, Any] = {
        "environment": environment,
        "load": 1.0,
        "rounds": 1,
        "compile_seconds": {"tokeniser": 0.5},
    }
    record |= {"cells": [asdict(cell) for cell in cells], "left_out": ["one, batch 1: no wheel"]}
    record["shares"] = [asdict(Share(PLAIN.name, 1, 1.0, 0.01, 0.02, 0.03, 0.01))]
    text = page(record)
    assert "| plain | 100 | 4.00 | 1.00 | 2.00 |  |  | 4 of 4 |" in text
    assert "| another | 60 | 2.00 |  |  |  |  | 3 of 4 |" in text
    assert "| plain | 1.0% | 2.0% | 3.0% | 1.0% | 7.0% |" in text
    assert "- one, batch 1: no wheel" in text


@pytest.mark.slow
def test_a_small_measurement_is_written_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = ["--model", str(EMBEDDED_BASE), "--cells", "2x2", "--rounds", "1", "--no-peer"]
    main(["--output", str(tmp_path), *given])
    record = json.loads((tmp_path / RECORD_FILE).read_text(encoding="utf-8"))
    by_arm = {cell["arm"]: cell for cell in record["cells"]}
    assert by_arm.keys() == {FREE.name, PLAIN.name, "forced", "auto", "head"}
    assert by_arm["forced"]["steps"] < by_arm[PLAIN.name]["steps"] == by_arm[FREE.name]["steps"]
    assert {share["arm"] for share in record["shares"]} == by_arm.keys() - {FREE.name}
    assert "## Batch 2, 2 records" in (tmp_path / TABLE_FILE).read_text(encoding="utf-8")
