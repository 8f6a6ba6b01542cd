from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import main as make_again
from drafter.evaluation.tables import page
from tests.drafter.evaluation.test_report_files import cells, results


def test_a_report_is_made_again_from_its_json(tmp_path: Path) -> None:
    results(cells()).save(tmp_path)
    make_again([str(tmp_path)])
    assert (tmp_path / "table.md").read_text() == page(results(cells()))
    with pytest.raises(SystemExit, match=r"none of results.json, heads.json, scale.json"):
        make_again([str(tmp_path / "elsewhere")])
