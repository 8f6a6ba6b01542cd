"""The closing summary is what the files say."""

from __future__ import annotations

from pathlib import Path

from drafter.statistics import DecodeCounts
from pipeline.io.files import locate
from pipeline.output.output_folder import OutputFolder
from pipeline.output.part_files import commit_part
from pipeline.output.summary import acceptance_lines, histogram_lines, read_totals, summarise
from tests.support.parts import BAD_PROMPT, generated_rows


def test_the_summary_is_what_the_files_say(tmp_path: Path) -> None:
    output = OutputFolder(locate(str(tmp_path)))
    output.create()
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}]
    commit_part(output, "p1", generated_rows("p1", rows, [None, None, BAD_PROMPT]))
    commit_part(output, "p2", generated_rows("p2", rows, [None, None, None]))
    totals = read_totals(output)
    assert (totals.rows, totals.errors) == (5, 1)
    assert (totals.counts.num_output_tokens, totals.counts.num_decode_steps) == (35, 15)
    text = summarise(output, totals, new_tokens=35, new_rows=6, seconds=10)
    assert "5 finished, 1 errors" in text
    assert "2.33 tokens a step (plain decoding: 1.00); 100% of the steps speculated" in text
    assert "33% of 60 draft tokens accepted" in text
    assert "4 tokens/s, 0.6 rows/s (6 rows in 00:10 of generation)" in text
    assert "speed" not in summarise(output, totals, new_tokens=0, new_rows=0, seconds=0)  # nothing was left to do
    bars = histogram_lines(totals.counts)[1:]
    assert [line.split()[0] for line in bars] == ["0", "1", "2"]
    assert [line.split()[-1] for line in bars] == ["33.3%", "0.0%", "66.7%"]
    assert [line.count("█") for line in bars] == [20, 0, 40]


def test_plain_decoding_has_a_sentence_of_its_own() -> None:
    counts = DecodeCounts(num_output_tokens=3, num_decode_steps=3, acceptance_histogram=[3])
    assert acceptance_lines(counts) == ["speculation none: no draft token was verified, so every step gave one token"]
