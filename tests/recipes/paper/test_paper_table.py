"""The table: ours, what is published beside it, and nothing where nothing is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.evaluation.results import PLAIN, Arm, Cell, Results
from drafter.statistics import DecodeCounts
from recipes.paper.head_settings import read_recipes
from recipes.paper.paper_table import paper_page, write_table
from recipes.paper.published_figures import Published, published_for

HEADS = {"/out/heads/medusa/head": "medusa", "/out/heads/ctc/head": "ctc"}


def counts(tokens: int, steps: int) -> DecodeCounts:
    return DecodeCounts(num_output_tokens=tokens, num_decode_steps=steps)


def cell(questions: str, arm: Arm, tokens: int, seconds: float, steps: int, batch: int = 1) -> Cell:
    return Cell(questions, batch, 0.0, arm, [[tokens]], [[seconds]], 0, {"": counts(tokens, steps)})


def results(*sets: str, batches: tuple[int, ...] = (1,)) -> Results:
    medusa, ctc = (Arm(name, "exact", 16) for name in HEADS)
    cells = [
        made
        for batch in batches
        for name in sets
        for made in (
            cell(name, PLAIN, 100, 10.0, 100, batch),
            cell(name, medusa, 100, 5.0, 40, batch),
            cell(name, ctc, 100, 4.0, 25, batch),
        )
    ]
    where = {
        "hardware": {"gpu": "a GPU", "processor": "", "cores": 1},
        "threads": 1,
        "dtype": "float32",
        "base": {"parameters": 7},
        "date": "today",
    }
    heads = {name: {"parameters": 1000 * (n + 1)} for n, name in enumerate(HEADS)}
    asked = {name: {"file": f"{name}.jsonl", "prompts": 1} for name in sets}
    return Results(where, {"max_new_tokens": 100, "rounds": 1}, asked, heads, [], cells)


def rows(page: str) -> list[list[str]]:
    lines = page.split("## ")[1].splitlines()
    return [[one.strip() for one in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_ours_and_theirs_stand_side_by_side() -> None:
    theirs = [
        Published("b", "chat", "medusa", "Medusa", 2.58, 2.13, "here"),
        Published("b", "chat", "medusa", "Medusa, again", 2.6, 2.2, "there"),
        Published("b", "sums", "medusa", "Medusa", 2.78, 2.33, "here"),
        Published("b", "chat", None, "EAGLE-1", 3.94, 2.9, "elsewhere"),
        Published("b", "mt-bench", "ctc", "CTC-drafter", 3.56, 2.78, "paper"),
    ]
    published = ["chat published β", "chat published γ", "sums published β", "sums published γ"]
    page = paper_page(results("chat", "sums"), HEADS, "b", theirs)
    assert rows(page) == [
        ["method", "parameters", "draft nodes", "chat β", "chat γ", "sums β", "sums γ", "published", *published],
        ["---"] * 12,
        ["vanilla", "", "", "1.00", "1.00", "1.00", "1.00", "", "", "", "", ""],
        ["medusa", "1,000", "16", "2.50", "2.00", "2.50", "2.00", "Medusa", "2.58", "2.13", "2.78", "2.33"],
        ["medusa", "", "", "", "", "", "", "Medusa, again", "2.60", "2.20", "", ""],
        ["ctc", "2,000", "16", "4.00", "2.50", "4.00", "2.50", "", "", "", "", ""],
        ["EAGLE-1", "", "", "", "", "", "", "EAGLE-1", "3.94", "2.90", "", ""],
    ]
    assert "## Published for what was not measured here\n\n| method" in page
    assert "| CTC-drafter | mt-bench | 3.56 | 2.78 |" in page
    assert "- CTC-drafter: paper" in page


def test_published_figures_stand_beside_batch_1_alone() -> None:
    theirs = [Published("b", "chat", "medusa", "Medusa", 2.58, 2.13, "here")]
    page = paper_page(results("chat", batches=(1, 4)), HEADS, "b", theirs)
    first, second = page.split("## Temperature 0, batch ")[1:]
    assert "2.58" in first
    assert "2.58" not in second.split("## ")[0]
    # Where that is not measured, they are listed by themselves.
    page = paper_page(results("chat", batches=(4,)), HEADS, "b", theirs)
    assert "published" not in rows(page)[0]
    assert "## Published for what was not measured here\n\n| method" in page
    assert "| Medusa | chat | 2.58 | 2.13 |" in page
    without = paper_page(results("chat"), HEADS, "other", [])
    assert "published" not in rows(without)[0]
    assert "Where the published figures come from" not in without


def test_a_method_that_was_not_measured_has_no_row_of_ours(tmp_path: Path) -> None:
    results("chat").save(tmp_path)
    page = write_table(tmp_path, {**HEADS, "/out/heads/eagle3/head": "eagle3"}, "b", [], tmp_path / "table.md")
    assert "eagle3" not in page
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == page


def test_published_figures_of_methods_without_a_row_of_ours_have_one() -> None:
    theirs = [
        Published("b", "chat", "eagle3", "EAGLE-3", 5.5, 4.5, "here"),
        Published("b", "chat", "eagle3", "EAGLE-3, again", 5.6, 4.6, "here"),
        Published("b", "chat", "hydra", "Hydra", 3.0, 2.4, "here"),
    ]
    heads = {**HEADS, "/out/heads/eagle3/head": "eagle3"}  # which was not measured; Hydra is not even asked for
    assert rows(paper_page(results("chat"), heads, "b", theirs))[3:] == [
        ["medusa", "1,000", "16", "2.50", "2.00", "", "", ""],
        ["ctc", "2,000", "16", "4.00", "2.50", "", "", ""],
        ["eagle3", "", "", "", "", "EAGLE-3", "5.50", "4.50"],
        ["eagle3", "", "", "", "", "EAGLE-3, again", "5.60", "4.60"],
        ["Hydra", "", "", "", "", "Hydra", "3.00", "2.40"],
    ]


@pytest.mark.parametrize("base", ["vicuna-7b", "vicuna-13b"])
def test_published_figures_are_of_rows_that_there_are(base: str) -> None:
    found = published_for(base)
    assert found
    for one in found:
        assert one.method is None or one.method in read_recipes()
        assert one.beta >= one.gamma >= 1  # no step is faster than a plain one
        assert one.questions in ("mt-bench", "gsm8k")
    assert len({(one.questions, one.name) for one in found}) == len(found)


def test_nothing_is_published_for_a_base_of_ours() -> None:
    assert published_for("smollm2-135m-instruct") == []
