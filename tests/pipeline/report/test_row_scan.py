from __future__ import annotations

from pathlib import Path

from pipeline.report.outputs import (
    open_rows,
    read_errors,
    read_full,
    read_rows,
)
from tests.pipeline.report.outputs import write_output


def test_the_pass_adds_up_all_files(tmp_path: Path) -> None:
    output = write_output(
        tmp_path / "out",
        [
            [
                {
                    "id": "a",
                    "accepted": [2, 0],
                    "category": "x",
                    "at": 0.9,
                    "seconds": 3.0,
                    "marks": {"num_cached_tokens": 1},
                }
            ],
            [
                {"id": "b", "accepted": [1], "category": "y", "at": 1.2, "seconds": 9.0},
                {"id": "c", "accepted": [4, 4], "category": "x", "at": 0.1, "seconds": 1.0},
            ],
        ],
        [{"request_id": f"e{n}", "input": "{}", "error_type": "Bad" + "XY"[n % 2], "message": "m"} for n in range(7)],
    )
    rows = read_rows(open_rows(output), "category", by_file=False, slowest=2, drawn=2)
    assert (rows.rows, rows.prompt_tokens, rows.cached_tokens) == (3, 6, 1)
    assert rows.counts.num_output_tokens == 4 + 2 + 10
    assert rows.counts.acceptance_histogram == [1, 1, 1, 0, 2]
    assert rows.counts.num_draft_tokens == 20
    assert {name: (group.rows, group.counts.num_output_tokens) for name, group in rows.groups.items()} == {
        "x": (2, 14),
        "y": (1, 2),
    }
    assert [row["request_id"] for row in rows.slowest] == ["b", "a"]
    assert len(rows.drawn) == 2
    assert [row["request_id"] for row in read_full(output, rows)] == list(rows.drawn)
    # The same rows are drawn whatever the files, so that two outputs can be compared.
    other = write_output(tmp_path / "other", [[{"id": name, "accepted": [0]} for name in "cba"]], [])
    assert read_rows(open_rows(other), None, by_file=False, slowest=0, drawn=2).drawn.keys() == rows.drawn.keys()

    errors = read_errors(output, each=2)
    assert (errors.rows, dict(errors.kinds)) == (7, {"BadX": 4, "BadY": 3})
    assert [row["request_id"] for row in errors.examples] == ["e0", "e2", "e1", "e3"]


def test_rows_are_grouped_by_their_file_where_there_is_no_category(tmp_path: Path) -> None:
    output = write_output(tmp_path, [[{"id": f"{f}.jsonl:{n}", "accepted": [n]} for f in "ab" for n in range(2)]], [])
    rows = read_rows(open_rows(output), None, by_file=True, slowest=1, drawn=0)
    assert {name: group.rows for name, group in rows.groups.items()} == {"a.jsonl": 2, "b.jsonl": 2}
    assert read_full(output, rows) == []
