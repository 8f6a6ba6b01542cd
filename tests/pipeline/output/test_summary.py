"""The closing summary is what the files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drafter.statistics import PLAIN, BatchChoice, DecodeCounts, MemberView, StepSums, Verdict
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part
from pipeline.output.summary import (
    acceptance_lines,
    histogram_lines,
    read_totals,
    speculation_record,
    speculation_sentences,
    summarise,
)
from tests.support.parts import BAD_PROMPT, generated_rows


def test_the_summary_is_what_the_files_say(tmp_path: Path) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    output.create()
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}]
    commit_part(output, "p1", generated_rows("p1", rows, [None, None, BAD_PROMPT]))
    commit_part(output, "p2", generated_rows("p2", rows, [None, None, None]))
    for folder in ("data", "errors"):
        (tmp_path / folder / "notes.txt").write_text("x")  # somebody's own
    totals = read_totals(output)
    assert (totals.rows, totals.errors) == (5, 1)
    assert (totals.counts.num_output_tokens, totals.counts.num_decode_steps) == (35, 15)
    text = summarise(output, totals, new_tokens=35, new_rows=6, seconds=10)
    assert "5 finished, 1 failed" in text
    assert "2.33 tokens a step (plain decoding: 1.00); 100% of the steps speculated" in text
    assert "33% of 60 draft tokens accepted" in text
    assert "4 tokens/s, 0.6 rows/s (6 rows in 10.0 s of generation)" in text
    told = summarise(output, totals, 35, 6, 10, ["The first.", "The second."]).splitlines()
    assert [line for line in told if "The " in line] == ["drafting    The first.", "            The second."]
    assert "speed" not in summarise(output, totals, new_tokens=0, new_rows=0, seconds=0)  # nothing was left to do
    bars = histogram_lines(totals.counts)[1:]
    assert [line.split()[0] for line in bars] == ["0", "1", "2"]
    assert [line.split()[-1] for line in bars] == ["33.3%", "0.0%", "66.7%"]
    assert [line.count("█") for line in bars] == [20, 0, 40]
    assert "▏" not in bars[1]  # which is for the few, not for none


def test_plain_decoding_has_a_sentence_of_its_own() -> None:
    counts = DecodeCounts(num_output_tokens=3, num_decode_steps=3, acceptance_histogram=[3])
    assert acceptance_lines(counts) == ["speculation none: every step was plain decoding, and gave one token"]
    never = DecodeCounts(300, 300, 300, 900, 0, [300])
    assert any(line.startswith("WARNING: only 0 of 900 draft tokens") for line in acceptance_lines(never))


PAYS = StepSums(
    steps=812,
    timed=812,
    plain=24,
    row_steps=3000,
    spec_row_steps=2760,
    seconds=40.0,
    plain_seconds=52.4,
    squared=2.2,
    plain_squared=4.0,
    product=2.8,
)
PAYS_NOT = StepSums(
    steps=400, timed=400, plain=388, row_steps=6400, spec_row_steps=192, seconds=60.0, plain_seconds=59.4
)
"""Steps at 4 rows, of which most speculate, and at 16, where drafting was only tried."""


AT_4 = BatchChoice(
    4,
    "memory",
    3,
    (MemberView("memory"), MemberView("head", "memory", 0.48), MemberView("cacheback", "memory", 1.004)),
    Verdict(7, 0.08, 0.31),
    PAYS,
)
AT_16 = BatchChoice(
    16,
    "memory",
    3,
    (MemberView("memory"), MemberView("head", PLAIN, 0.4), MemberView("cacheback", PLAIN, 0.9)),
    Verdict(3, 0.31, 0.22),
    PAYS_NOT,
)


def test_what_was_chosen_and_why_is_said_in_sentences() -> None:
    whole, small, large, unused = speculation_sentences([AT_4, AT_16])
    assert whole.startswith("The decode steps were 1.12 ± ")
    assert whole.endswith(
        " times as fast as plain decoding: 01:40, where that would have taken about 01:51 (an estimate from 1,212 "
        "steps, 412 of them plain)."
    )
    assert small == (
        "Memory drafts at 4 rows: a draft token costs 0.08 of a step and brings 0.31 tokens; "
        "812 steps, of which 92% speculated, were 1.31 ± 0.03 times as fast as plain decoding."
    )
    assert large == (
        "Plain decoding at 16 rows: a draft token of memory costs 0.31 of a step and would bring 0.22 tokens; "
        "drafting was tried in 3% of 400 steps."
    )
    # No estimate of now stands beside the choice: what is said of the others is what they were compared by.
    assert unused == (
        "Not chosen in the end: the draft head (0.48 times as fast as memory at 4 rows), "
        "cacheback (no faster than memory at 4 rows)."
    )


def test_what_is_not_known_of_drafting_is_not_said() -> None:
    assert speculation_sentences([]) == []
    assert speculation_record([]) is None
    few = StepSums(steps=3, timed=3, row_steps=3, seconds=0.1, plain_seconds=0.1)
    assert speculation_sentences([BatchChoice(1, "", 0, (), None, few)]) == [
        "Not decided at 1 row: 3 steps are too few to tell whether drafting pays."
    ]
    untimed = StepSums(steps=9, row_steps=9, spec_row_steps=9, seconds=2.0, plain_seconds=3.0)
    assert speculation_sentences([BatchChoice(1, "", 0, (), Verdict(15, 0.02, 0.1), untimed)]) == [
        "The decode steps were 1.50 times as fast as plain decoding: 2.0 s, where that would have taken about 3.0 s "
        "(an estimate from latencies measured at start).",
        "Drafting at 1 row: a draft token costs 0.02 of a step and brings 0.10 tokens; "
        "9 steps, of which 100% speculated, were 1.50 times as fast as plain decoding.",
    ]
    # What was chosen may have taken more to find out than it gained.
    late = replace(untimed, seconds=4.0)
    assert speculation_sentences([BatchChoice(1, "", 0, (), Verdict(15, 0.02, 0.1), late)])[-1] == (
        "Drafting at 1 row: a draft token costs 0.02 of a step and brings 0.10 tokens; it has not paid yet, "
        "with what finding out took: 9 steps, of which 100% speculated, were 0.75 times as fast as plain decoding."
    )
    # A head that is the best of its kind and does not pay is named, too.
    plainly = BatchChoice(1, "head", 1, (MemberView("head"),), Verdict(3, 0.3, 0.1), few)
    assert speculation_sentences([plainly])[-1] == "Not chosen in the end: the draft head (plain decoding is faster)."


def test_the_record_for_programs_has_what_the_choice_rested_on() -> None:
    record = speculation_record([AT_4])
    assert record is not None
    assert (record["estimated_speedup"], record["plain_steps"], record["speculated_share"]) == (1.31, 24, 0.92)
    (choice,) = record["by_rows"]
    assert (choice["rows"], choice["chosen"], choice["drafts"], choice["nodes"]) == (4, "memory", True, 7)
    assert (choice["token_cost"], choice["token_gain"], choice["seconds"]) == (0.08, 0.31, 40.0)
    assert choice["members"][0] == {"name": "head", "beside": "memory", "relative": 0.48}
    assert "66" not in str(record)
