from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.compare import RowPairs

NAMES = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(first=NAMES, second=NAMES)
def test_every_row_of_both_is_in_one_pair_and_the_others_are_left(first: list[int], second: list[int]) -> None:
    pairs = RowPairs(
        iter([{"request_id": str(name), "of": 1} for name in first]),
        iter([{"request_id": str(name), "of": 2} for name in second]),
    )
    found = list(pairs)
    assert sorted(int(ours["request_id"]) for ours, _ in found) == sorted(set(first) & set(second))
    assert all(
        ours["request_id"] == theirs["request_id"] and (ours["of"], theirs["of"]) == (1, 2) for ours, theirs in found
    )
    assert set(map(int, pairs.only_first)) == set(first) - set(second)
    assert set(map(int, pairs.only_second)) == set(second) - set(first)


def test_rows_of_the_same_order_do_not_pile_up() -> None:
    rows = [{"request_id": str(name)} for name in range(50)]
    pairs = RowPairs(iter(rows), iter(rows))
    for _ in pairs:
        assert len(pairs.only_first) == len(pairs.only_second) == 0
