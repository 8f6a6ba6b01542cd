""""""

from __future__ import annotations

from drafter.engine import scheduler as row_limit
from drafter.engine.scheduler import RowLimit


def steps_until(limit: RowLimit, most: int) -> int:
    steps = 0
    while limit.most < most:
        limit.reached()
        steps += 1
    return steps


def test_half_are_left_and_come_back_one_by_one() -> None:
    limit = RowLimit(9)
    limit.ran_out(9)
    assert limit.most == 5
    assert steps_until(limit, 6) == 256
    assert steps_until(limit, 9) == 3 * 256
    limit.reached()
    assert limit.most == 9


def test_a_try_that_fails_is_put_off_for_twice_as_long() -> None:
    limit = RowLimit(4)
    for pause in (256, 512, 1024):
        limit.ran_out(2)
        assert limit.most == 1
        limit.reached()
        assert steps_until(limit, 2) == pause - 1
    for _ in range(20):
        limit.ran_out(2)
    assert steps_until(limit, 2) == row_limit._LONGEST_PAUSE


def test_memory_that_reaches_lets_in_no_more_than_there_are_slots() -> None:
    limit = RowLimit(1)
    limit.reached()
    assert limit.most == 1
