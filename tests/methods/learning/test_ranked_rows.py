from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.learning.rows import RankedRows, rank


def test_new_and_surprising_rows_rank_high() -> None:
    assert rank(1.0, 10) > rank(0.5, 10) > rank(0.25, 10)
    assert rank(0.5, 600) > rank(0.5, 10)
    # Half as surprising is as good as 512 rows older.
    assert rank(1.0, 0) == rank(0.5, 512)


RANKS = st.floats(-20, 20)
ROWS = st.lists(st.tuples(RANKS, st.integers(1, 60)), max_size=40)


@given(rows=ROWS, limit=st.integers(1, 200))
def test_memory_is_bounded_and_the_best_stay(rows: list[tuple[float, int]], limit: int) -> None:
    kept: RankedRows[int] = RankedRows(limit)
    for place, (worth, nbytes) in enumerate(rows):
        before = set(kept)
        fits = kept.takes(worth, nbytes)
        assert kept.put(worth, nbytes, place) == fits
        gone = before - set(kept)
        assert all(rows[one][0] < worth for one in gone)  # nothing goes for what is worth less
        assert fits or not gone
        assert kept.used == sum(rows[one][1] for one in kept) <= limit
    order = []
    while (best := kept.take_best()) is not None:
        order.append(best[0])
    assert order == sorted(order, reverse=True)
    assert kept.used == len(kept) == 0


@given(rows=st.lists(RANKS, max_size=40, unique=True), most=st.integers(1, 10))
def test_of_rows_of_one_size_those_of_the_highest_ranks_are_kept(rows: list[float], most: int) -> None:
    kept: RankedRows[float] = RankedRows(most)
    for worth in rows:
        kept.put(worth, 1, worth)
    assert sorted(kept) == sorted(rows)[-most:]
