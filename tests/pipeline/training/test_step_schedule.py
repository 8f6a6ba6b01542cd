from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.steps import share, steps_of, visits


def taken(rows: list[int], per_step: int, done: int, steps: int) -> list[tuple[int, int, int]]:
    """`(epoch, part, step of the part)` of each step of a run."""
    flat: list[tuple[int, int, int]] = []
    for visit in visits(rows, per_step, 7, done, steps):
        assert visit.first_step == done + len(flat)
        flat += [(visit.epoch, visit.part, visit.skip + index) for index in range(visit.steps)]
    return flat


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    per_step=st.integers(1, 6),
    steps=st.integers(1, 60),
    data=st.data(),
)
def test_a_run_that_goes_on_takes_the_steps_that_were_left(
    rows: list[int], per_step: int, steps: int, data: st.DataObject
) -> None:
    rows = [*rows, per_step]
    whole = taken(rows, per_step, 0, steps)
    assert len(whole) == steps
    done = data.draw(st.integers(0, steps))
    assert taken(rows, per_step, done, steps) == whole[done:]
    # Every epoch takes every step of every part once, and only the last epoch may be cut short.
    for epoch in range(whole[-1][0]):
        steps_taken = Counter((part, step) for one, part, step in whole if one == epoch)
        assert steps_taken == Counter(
            (part, step) for part, count in enumerate(rows) for step in range(count // per_step)
        )


def test_epochs_differ_in_the_order_of_parts_and_in_what_meets() -> None:
    orders = [[part for one, part, _ in taken([4] * 8, 4, 0, 24) if one == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    lengths = [random.Random(0).randrange(20, 200) for _ in range(40)]
    first, second = (steps_of(lengths, 4, 0, epoch, 0) for epoch in range(2))
    assert first == steps_of(lengths, 4, 0, 0, 0)
    assert {frozenset(step) for step in first} != {frozenset(step) for step in second}


def test_texts_of_like_length_share_a_step() -> None:
    lengths = [random.Random(1).randrange(10, 500) for _ in range(400)]
    steps = steps_of(lengths, 8, 3, 0, 0)
    assert sorted(text for step in steps for text in step) == list(range(400))
    assert all([lengths[text] for text in step] == sorted(lengths[text] for text in step) for step in steps)
    padded = sum(8 * max(lengths[text] for text in step) for step in steps)
    assert padded < 1.25 * sum(lengths)
    # One text too many waits for another epoch, and not always the same.
    left_out = [
        set(range(401)) - {text for step in steps_of([*lengths, 9], 8, 3, e, 0) for text in step} for e in range(9)
    ]
    assert all(len(one) == 1 for one in left_out)
    assert len({*map(frozenset, left_out)}) > 1


@given(places=st.integers(1, 40), micro_batches=st.integers(1, 4), workers=st.integers(1, 5))
def test_workers_share_a_step_among_them(places: int, micro_batches: int, workers: int) -> None:
    shares = [share(places, micro_batches, rank, workers) for rank in range(workers)]
    assert sorted(place for mine in shares for micro in mine for place in micro) == list(range(places))
    if places >= workers * micro_batches:
        assert all(micro for mine in shares for micro in mine)
    # A micro-batch has the same texts whoever takes them.
    together = [sorted(place for mine in shares for place in mine[micro]) for micro in range(micro_batches)]
    assert together == [sorted(one) for one in share(places, micro_batches, 0, 1)]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_literal_share(workers: int) -> None:
    expected = {1: [[0, 1, 2, 3], [4, 5, 6, 7, 8]], 3: [[1], [5, 8]]}
    assert share(9, 2, min(1, workers - 1), workers) == expected[workers]
