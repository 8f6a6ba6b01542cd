from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.compare import differing_spans
from pipeline.report.outputs import first_difference

TOKENS = st.lists(st.integers(0, 4), max_size=12)


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_what_both_have_is_not_marked_though_it_has_moved() -> None:
    ours, theirs = differing_spans([1, 2, 3, 4], [1, 9, 8, 3, 4])
    assert ours == [(0, 1, False), (1, 2, True), (2, 4, False)]
    assert theirs == [(0, 1, False), (1, 3, True), (3, 5, False)]


@given(first=TOKENS, second=TOKENS)
def test_spans_cover_both_and_share_the_rest(first: list[int], second: list[int]) -> None:
    both = differing_spans(first, second)
    shared = []
    for tokens, spans in zip((first, second), both, strict=True):
        assert [place for start, stop, _ in spans for place in range(start, stop)] == list(range(len(tokens)))
        shared.append([token for start, stop, differs in spans if not differs for token in tokens[start:stop]])
    assert shared[0] == shared[1]
    assert (first_difference(first, second) is None) == (not any(differs for spans in both for _, _, differs in spans))
