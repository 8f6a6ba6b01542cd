from __future__ import annotations

from drafter.statistics import DecodeCounts
from pipeline.report.page import acceptance_tables


def test_steps_are_counted_by_what_they_accepted_and_by_depth() -> None:
    counts = DecodeCounts(num_draft_tokens=20, acceptance_histogram=[1, 2, 1], num_decode_steps=4)
    exactly, by_depth = acceptance_tables(counts)
    assert exactly.shares == [("0", 0.25), ("1", 0.5), ("2", 0.25)]
    assert by_depth.shares == [("1", 0.75), ("2", 0.25)]
    assert acceptance_tables(DecodeCounts()) == []
