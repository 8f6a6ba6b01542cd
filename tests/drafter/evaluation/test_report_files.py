"""Figures, tables and plots of results that are written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from drafter.evaluation.results import PLAIN, Arm, Cell, Results, Skipped, StageSums, figures
from drafter.evaluation.tables import (
    acceptance_rows,
    category_table,
    latex_table,
    page,
    remarks,
    speed_table,
    speed_tables,
    stage_table,
    tree_ratios,
    write_report,
)
from drafter.statistics import DecodeCounts, speedup

HEAD = Arm("build/heads/ctc", "exact", 16)


def counts(tokens: int, histogram: list[int]) -> DecodeCounts:
    steps = sum(histogram)
    accepted = sum(depth * number for depth, number in enumerate(histogram))
    return DecodeCounts(tokens, steps, steps, 16 * steps, accepted, histogram)


def cells(batch: int = 1) -> list[Cell]:
    """Two prompts, two rounds: plain decoding runs at 10 and 20 tokens/s, then at twice that."""
    tokens = [[10, 20], [10, 20]]
    stages = StageSums({"draft": 0.03, "tree": 0.01, "verify": 0.05, "commit": 0.01, "host": 0.0}, 10)
    return [
        Cell("chat", batch, 0.0, PLAIN, tokens, [[1.0, 1.0], [0.5, 0.5]], 0, {"stem": counts(60, [60])}, stages),
        Cell(
            *("chat", batch, 0.0, HEAD, tokens, [[0.5, 0.5], [0.125, 0.125]], 0),
            {"stem": counts(20, [2, 0, 6]), "math": counts(40, [16, 12])},
            stages,
        ),
    ]


def results(some: list[Cell]) -> Results:
    environment = {
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m jobs.evaluate --output out",
        "commit": "abc",
        "uncommitted_changes": False,
        "hardware": {"processor": "CPU", "cores": 2, "gpu": None},
        "threads": 2,
        "dtype": "float32",
        "base": {"parameters": 1000},
        "versions": {"torch": "2"},
    }
    questions = {"chat": {"file": "chat.jsonl", "prompts": 2, "categories": ["math", "stem"]}}
    skipped = [Skipped("hydra", "static", "it has none")]
    return Results(environment, {"max_new_tokens": 20, "rounds": 2}, questions, {}, skipped, some)


def test_rates_and_speedups() -> None:
    assert cells()[0].rates == [[10.0, 20.0], [20.0, 40.0]]
    assert speedup([30.0, 80.0, 10.0], [15.0, 20.0, 10.0]) == 2.0


def test_figures_compare_rounds_of_the_same_setting() -> None:
    plain, head = figures(cells())
    assert (plain.rate, plain.gamma, plain.beta) == (22.5, 1.0, 1.0)
    # Twice and four times plain decoding's speed in the two rounds.
    assert head.gamma == 3.0
    # 60 tokens in 36 steps, of which 18 accepted a token and 6 two.
    assert head.beta == pytest.approx(60 / 36)


def test_places_are_not_mixed() -> None:
    slow = [
        Cell(one.questions, 8, one.temperature, one.arm, one.tokens, [[9.0, 9.0]] * 2, 0, one.counts) for one in cells()
    ]
    found = figures([*cells(), *slow])
    assert [one.gamma for one in found] == [1.0, 3.0, 1.0, 1.0]


def test_the_speed_table() -> None:
    assert speed_table(figures(cells())).split("\n") == [
        "| method | tree | draft nodes | chat β | chat γ | chat faster | differing tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| plain decoding |  |  | 1.00 | 1.00 |  | 0 of 60 |",
        "| ctc | exact | 16 | 1.67 | 3.00 | 2 of 2, p 0.5 | 0 of 60 |",
    ]


def test_figures_of_several_prompts_have_intervals() -> None:
    tokens, steps = [10, 20, 30, 40, 50], [10, 10, 15, 10, 20]
    plain, head = (
        Cell("chat", 1, 0.0, arm, [tokens], [seconds], 0, {"": counts(150, [65])}, None, tokens, made_in)
        for arm, seconds, made_in in ((PLAIN, [1.0] * 5, tokens), (HEAD, [0.5, 0.5, 1.25, 0.5, 0.5], steps))
    )
    found = figures([plain, head])[1]
    assert found.beta_interval is not None
    assert found.gamma_interval is not None
    assert found.beta_interval == pytest.approx((1.6, 3.2), abs=0.3)
    assert found.gamma_interval == pytest.approx((1.4, 2.0), abs=0.2)
    assert found.faster == (4, 5)
    (row,) = [line for line in speed_table([found]).split("\n") if line.startswith("| ctc")]
    assert re.search(r"\| 2\.31 \(1\.\d\d to [23]\.\d\d\) \| 1\.\d\d \(1\.\d\d to 2\.00\) \| 4 of 5, p 0\.38 \|", row)
    # Two of them are turns of the one that was slower: together they were faster.
    assert figures([plain, replace(head, question_by_prompt=[0, 1, 2, 2, 2])])[1].faster == (3, 3)
    together = replace(head, batch=8, tokens=[[150]], seconds=[[2.0]])
    assert figures([replace(plain, batch=8, tokens=[[150]], seconds=[[4.0]]), together])[1].gamma_interval is None


def test_the_tables_by_category_and_stage() -> None:
    assert category_table(cells()[1:]).split("\n") == [
        "| method | tree | draft nodes | math β | stem β |",
        "| --- | --- | --- | --- | --- |",
        "| ctc | exact | 16 | 1.43 | 2.50 |",
    ]
    assert stage_table(cells()[1:]).split("\n")[2] == (
        "| ctc | exact | 16 | 3.00 (30%) | 1.00 (10%) | 5.00 (50%) | 1.00 (10%) | 0.00 (0%) | 10.00 |"
    )


def test_the_table_of_accepted_draft_tokens_by_position() -> None:
    plain, head = acceptance_rows(figures(cells()))
    # Of 36 steps 18 accepted at least a token, and 6 of them two.
    shares = {f"≥ {place}": "0.00" for place in range(1, 9)}
    assert {name: head[name] for name in shares} == shares | {"≥ 1": "0.50", "≥ 2": "0.17"}
    assert {name: plain[name] for name in shares} == shares
    assert (head["questions"], head["β"], head["tokens/s"], head["γ"]) == ("chat", "1.67", "75", "3.00")
    rule, names, _, row, *_ = latex_table([{"a_b": "50 %", "β": 1}, {"a_b": "R & D", "β": 2}]).split("\n")[1:]
    assert latex_table([{"≥ 1 ÷": "a^b {c} ~$\\"}]).split("\n")[2::2][:2] == [
        r"$\geq$ 1 $\div$ \\",
        r"a\textasciicircum{}b \{c\} \textasciitilde{}\$\textbackslash{} \\",
    ]
    assert (rule, names, row) == (r"\toprule", r"a\_b & $\beta$ \\", r"50 \% & 1 \\")


def test_many_sets_of_questions_have_a_row_each() -> None:
    one = results(cells())
    many = replace(one, questions={str(name): one.questions["chat"] for name in range(5)})
    assert "| chat | 0 | 1 | ctc | exact | 16 | 1.67 |" in speed_tables(many)
    assert "chat β" not in speed_tables(many)


def test_a_tree_is_compared_with_the_chain_of_as_many_tokens() -> None:
    plain, tree = cells()
    chain = replace(
        tree, arm=replace(HEAD, tree="chain"), counts={"": counts(60, [40])}, seconds=[[1.0, 1.0], [0.5, 0.5]]
    )
    (row,) = tree_ratios(figures([plain, tree, chain, replace(chain, arm=replace(chain.arm, nodes=4))]))
    assert row == {"questions": "chat", "T": "0", "batch": 1, "method": "ctc", "draft nodes": 16} | {
        "β, tree ÷ chain": "1.11",
        "γ, tree ÷ chain": "3.00",
    }


def test_what_a_reader_must_know_is_said_first() -> None:
    training = {
        "data": {"mine": {"texts": 3, "targets": 40}, "yours": {"texts": 2, "targets": 2}},
        "history": [{"step": 5, "seconds": 5400}],
    }
    arm = replace(HEAD, acceptance=2.5)
    rejected = replace(cells()[1], arm=arm, counts={"": counts(205, [195, 5])})
    heads = {HEAD.drafter: {"parameters": 1000, "training": training}}
    said = remarks(replace(results([cells()[0], rejected]), heads=heads, plan={"acceptance": 2.5}))
    assert said[0] == "ctc: 1,000 parameters, learned from 5 texts with 42 targets, 5 steps, in 1.5 hours."
    assert said[1].startswith("**Acceptance is FORCED to β 2.5**")
    assert said[2].startswith("**ctc, FORCED to β 2.5 on chat: WARNING: only 5 of 3,200 draft tokens were accepted")
    more = {"data": {"texts": 7, "targets": 8}, "history": [{"step": 9}], "start": training}
    heads = {HEAD.drafter: {"parameters": 1000, "training": more}}
    (trained_on,) = remarks(replace(results(cells()), heads=heads))
    assert trained_on.endswith(
        "learned from 7 texts with 8 targets, 9 steps, after 5 texts with 42 targets, 5 steps, in 1.5 hours."
    )
    assert remarks(results(cells())) == []


def test_a_category_may_be_called_as_a_column_is() -> None:
    named = replace(cells()[1], counts={"method": counts(20, [2, 0, 6])})
    head, _, row = category_table([named]).split("\n")
    assert (head.count("method"), row.startswith("| ctc |")) == (2, True)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    before = results([*cells(), *cells(8)])
    before.save(tmp_path)
    after = Results.load(tmp_path)
    assert after == before
    assert after.identity == before.identity
    after.environment["commit"] = "def"
    assert after.identity != before.identity
    assert not list(tmp_path.glob("*.partial"))


def test_a_report_has_every_table(tmp_path: Path) -> None:
    text = write_report(results([*cells(), *cells(8)]), tmp_path).read_text()
    assert text == page(results([*cells(), *cells(8)]))
    assert (tmp_path / "table.tex").read_text().count("chat & 0 & 8") == 2
    for heading in ("Temperature 0, batch 8", "Accepted draft tokens", "β by category: chat", "Left out"):
        assert f"## {heading}\n" in text
