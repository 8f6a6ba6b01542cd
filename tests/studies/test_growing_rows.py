from __future__ import annotations

import json
from pathlib import Path

from studies.growing_rows import main, requests_of


def test_lengths_are_between_the_two_and_most_are_short() -> None:
    lengths = sorted(
        len(one.prompt_ids) + one.sampling.over().max_new_tokens for one in requests_of(200, 50, 2000, 100)
    )
    assert 50 <= lengths[0] < 60
    assert 1800 < lengths[-1] <= 2000
    assert lengths[100] < 500


def test_rows_that_grow_are_more(tmp_path: Path) -> None:
    sizes = ["--gib", "0.006", "--requests", "12", "--shortest", "10", "--longest", "150", "--slots", "12"]
    main([*sizes, "--output", str(tmp_path)])
    full, grow = json.loads((tmp_path / "growing_rows.json").read_text())["cells"]
    assert grow["most"] > full["most"] == full["slots"]
    assert "rows that grow" in (tmp_path / "growing_rows.md").read_text()
