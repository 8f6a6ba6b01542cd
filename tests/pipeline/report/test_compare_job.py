from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.compare import main
from tests.pipeline.report.outputs import write_output


def output(
    folder: Path, rows: list[dict[str, Any]], model: str = "no/such-model", files: int = 2, **facts: Any
) -> Path:
    size = -(-len(rows) // files)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    written = write_output(folder, parts, [])
    run = {"config": {"model": model}, "meaning": {"model": model, "reading": {}}, "state": "finished", **facts}
    written.run_file.write_text(json.dumps(run))
    return folder


def row(name: object, tokens: list[int], **columns: Any) -> dict[str, Any]:
    return {"id": str(name), "accepted": [len(tokens) - 1], "token_ids": tokens, "marks": columns}


def test_one_token_in_ten_thousand_rows_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {name: [name % 50, 7, name % 13, 9] for name in range(10_000)}
    first = output(tmp_path / "a", [row(name, tokens) for name, tokens in texts.items()])
    texts[6_789] = [*texts[6_789][:2], 49, 9]
    second = output(tmp_path / "b", [row(name, tokens) for name, tokens in texts.items()], files=3)
    assert main([str(first), str(second)]) == 0
    printed = capsys.readouterr()
    assert "10,000 rows in both outputs, 9,999 of them with the same tokens" in printed.out
    assert "earliest difference: row 6789, token 2" in printed.out
    assert "tokens are shown as numbers" in printed.err
    page = (second / "comparison.html").read_text()
    assert "1 of 1 rows that differ" in page
    assert page.count('<span class="differs">') == 2
    assert '<span class="differs">49 </span>' in page


def test_utility_is_compared_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {"a": ("4", "4"), "b": ("5", "4"), "c": ("6", "6"), "d": ("1", "4"), "only": ("2", "2")}
    first, second = (
        output(
            tmp_path / str(side),
            [
                row(name, [int(texts[side])], text=f"<b>{texts[side]}</b>", answer="#### 4")
                for name, texts in said.items()
                if side or name != "only"
            ],
        )
        for side in (0, 1)
    )
    page = tmp_path / "page.html"
    assert main([str(first), str(second), "--scorer", "number", "--target", "answer", "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert "0 rows only in" in out
    assert "1 only in" in out
    # Differences of 0, 1, 0 and 1: a mean of 1/2, and a standard deviation of 0.577.
    assert "utility by number: 0.2500 and 0.7500, difference +0.5000 ± 0.5658 (95 %, paired)" in out
    assert "worth 0 and 1" in page.read_text()


def test_outputs_of_files_with_other_names_are_paired_by_their_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(file: str, *said: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
        return [row(f"{file}:{n}", tokens, prompt_token_ids=prompt) for n, (prompt, tokens) in enumerate(said)]

    first = output(tmp_path / "a", rows("a.jsonl", ([1], [5]), ([2], [6]), ([1], [7]), ([3], [8])))
    second = output(tmp_path / "b", rows("b.jsonl", ([2], [6]), ([1], [5]), ([1], [9])))
    assert main([str(first), str(second)]) == 0
    printed = capsys.readouterr()
    assert "3 rows in both outputs, 2 of them with the same tokens" in printed.out
    assert f"1 rows only in {first}, 0 only in {second}" in printed.out
    assert "the outputs have no row's name in common: rows are paired by their prompts" in printed.err
    other = output(tmp_path / "c", rows("c.jsonl", ([9], [5])))
    assert main([str(first), str(other)]) == 2
    assert f"error: {first} and {other} have no row in common, by its name" in capsys.readouterr().err


def test_lines_of_files_that_differ_are_paired_by_their_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line was put before the others."""
    first, second = (
        output(
            tmp_path / name,
            [row(f"a.jsonl:{n}", [prompt], prompt_token_ids=[prompt]) for n, prompt in enumerate(prompts)],
            input=[["a.jsonl", len(prompts), name]],
            named_by=None,
        )
        for name, prompts in (("one", [1, 2, 3]), ("two", [9, 1, 2, 3]))
    )
    assert main([str(first), str(second)]) == 0
    printed = capsys.readouterr()
    assert "3 rows in both outputs, 3 of them with the same tokens" in printed.out
    assert "names of their lines, in files that differ: rows are paired by their prompts" in printed.err
    assert main([str(first), str(first)]) == 0
    assert "paired" not in capsys.readouterr().err


@pytest.mark.parametrize("torn", ["first", "last"])
def test_a_torn_file_of_rows_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: str) -> None:
    good, bad = (output(tmp_path / name, [row("a", [1]), row("b", [2])]) for name in ("good", "bad"))
    file = sorted(bad.rglob("*.parquet"))[0 if torn == "first" else -1]
    file.write_bytes(file.read_bytes()[:-6])
    assert main([str(good), str(bad)]) == 2
    assert f"error: output {bad} has rows that cannot be read: " in capsys.readouterr().err


def test_bad_input_of_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = output(tmp_path / "good", [row("a", [1])])
    empty = tmp_path / "empty"
    write_output(empty, [], []).run_file.write_text(json.dumps({"config": {}, "meaning": {}, "state": "running"}))
    for arguments, message in (
        ([good, tmp_path], "is not the output of a generation job"),
        ([good, empty], f"output {empty} has no finished rows"),
        ([good, good, "--scorer", "number"], "name it with --target"),
        ([good, good, "--examples", "-1"], "--examples must be at least 0, not -1"),
    ):
        assert main([str(one) for one in arguments]) == 2
        assert message in capsys.readouterr().err
