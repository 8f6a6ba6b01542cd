"""What a submission leaves to the next comes back as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pipeline.engines.ledger import SavedRow, read_unfinished, write_unfinished
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder


def test_saved_rows_come_back_and_none_leave_no_file(tmp_path: Path) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    output.create()
    generated = {"text": "é", "token_ids": [1, 2], "empty": [], "beta": 1.25, "at": datetime(2026, 1, 2, tzinfo=UTC)}
    problem = {"type": "TimedOut", "message": "late", "input": None, "attempts": 2}
    rows = [
        SavedRow("p1", "a", generated, None, 0),
        SavedRow("p1", "b", None, None, 2),
        SavedRow("p2", "c", None, problem, 1),
    ]
    assert read_unfinished(output) == []
    write_unfinished(output, rows)
    assert read_unfinished(output) == rows
    write_unfinished(output, rows[:1])
    assert read_unfinished(output) == rows[:1]
    write_unfinished(output, [])
    assert not Path(output.unfinished.path).exists()
    assert not list((tmp_path / "_temporary").iterdir())
