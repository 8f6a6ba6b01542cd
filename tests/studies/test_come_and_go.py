from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from studies.come_and_go import main
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def test_a_later_turn_is_read_from_where_the_last_one_ended(tmp_path: Path) -> None:
    models = ["--model", str(EMBEDDED_BASE), "--head", str(EMBEDDED_HEADS / "ctc"), "--slots", "2", "--rounds", "1"]
    models += ["--turns", "3"]
    main([*models, "--before", str(ROOT), "--output", str(tmp_path)])
    runs = json.loads((tmp_path / "come_and_go.json").read_text())["runs"]
    without, now = (runs[name][0]["chat"] for name in ("without kept rows", "now"))
    assert [turn["prompt"] for turn in without] == [turn["prompt"] for turn in now]
    assert without[-1]["read"] == without[-1]["prompt"] - 1 > 2 * now[-1]["read"]
    assert "| drafts, 2 rows |" in (tmp_path / "come_and_go.md").read_text()
