"""The page and the plot, of a record written by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import Cell, Failure
from benchmarks.peers.contenders import Contender, contenders
from benchmarks.peers.tables import contenders_of, page, plot

MEASURED = [Contender("this engine", "none", "this_engine"), Contender("slow", "plain", "slow")]


def record() -> dict[str, Any]:
    cells = [
        Cell(one.name, context, batch, 0, seconds, 100, 99, 100, 3 * 2**20)
        for batch in (1, 4)
        for context in ("short", "long")
        for one, seconds in zip(MEASURED, (1.0, 2.0), strict=True)
    ]
    return {
        "environment": {
            "hardware": {"gpu": None, "processor": "abacus", "cores": 2},
            "threads": 2,
            "dtype": "float32",
            "base": {"parameters": 1234567},
            "command": "python -m benchmarks.peers",
            "commit": "abc",
            "uncommitted_changes": True,
            "date": "today",
        },
        "rounds": 1,
        "max_new_tokens": 8,
        "contenders": [asdict(one) for one in MEASURED],
        "versions": {"slow, plain": {"snail": "1.0", "shell": "2.0"}},
        "cells": [asdict(cell) for cell in cells],
        "failures": [asdict(Failure("lame, plain", 4, "it does not start"))],
    }


def test_the_page() -> None:
    text = page(record(), "peers.png")
    assert "abacus, 2 cores, 2 threads, float32; base of 1,234,567 parameters" in text
    assert "commit abc with changes, today" in text
    assert text.index("## Short prompts, batch 1") < text.index("## Short prompts, batch 4") < text.index("## Long")
    assert text.count("| this engine, none | 100 | 2.00 | 2.00 | 99.0 % | 3 |") == 4
    assert text.count("| slow, plain | 50 | 1.00 | 1.00 | 99.0 % | 3 |") == 4
    assert "okens a step" not in text  # records of before do not have it
    assert "| slow, plain | snail 1.0, shell 2.0 |" in text
    assert "- lame, plain, batch 4: it does not start" in text


def test_tokens_a_step_are_told_where_an_engine_tells_them() -> None:
    told = record()
    told["cells"] = [cell | {"steps": 40} if cell["contender"] == MEASURED[0].name else cell for cell in told["cells"]]
    text = page(told, "peers.png")
    assert "| tokens/s | tokens a step |" in text
    assert text.count("| this engine, none | 100 | 2.50 | 2.00 |") == 4
    assert text.count("| slow, plain | 50 |  | 1.00 |") == 4


def test_the_plot(tmp_path: Path) -> None:
    figure = plot([Cell(**cell) for cell in record()["cells"]], contenders_of(record()))
    assert [panel.get_title() for panel in figure.axes] == ["short prompts", "long prompts"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 100], [4, 100]]  # type: ignore[union-attr]
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_head_is_called_by_its_folders_last_part() -> None:
    found = [one.name for one in contenders([], "build/heads/mine/")]
    assert found == ["this engine, none", "this engine, ngram", "this engine, mine", "this engine, auto"]
