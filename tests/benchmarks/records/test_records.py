from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from benchmarks.records.__main__ import RECORD_FILE, TABLE_FILE, main
from benchmarks.records.measuring import FREE, PLAIN, Cell
from benchmarks.records.tables import ratio
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


@pytest.mark.slow
def test_a_small_measurement_is_written_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = ["--model", str(EMBEDDED_BASE), "--cells", "2x4", "--rounds", "1", "--no-peer"]
    main(["--output", str(tmp_path), *given])
    record = json.loads((tmp_path / RECORD_FILE).read_text(encoding="utf-8"))
    by_arm = {cell["arm"]: cell for cell in record["cells"]}
    assert by_arm.keys() == {FREE.name, PLAIN.name, "forced", "auto", "head"}
    assert by_arm["forced"]["steps"] < by_arm[PLAIN.name]["steps"] == by_arm[FREE.name]["steps"]
    assert {share["arm"] for share in record["shares"]} == by_arm.keys() - {FREE.name}
    assert "## Batch 2, 4 records" in (tmp_path / TABLE_FILE).read_text(encoding="utf-8")
