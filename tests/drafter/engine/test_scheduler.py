"""The limit of rows after memory ran out, and the waiting queue."""

from __future__ import annotations

import math

import pytest

from drafter.acceptance.contract import ExactVerifier
from drafter.engine import scheduler as row_limit
from drafter.engine.scheduler import RowLimit, WaitingQueue
from drafter.engine.sequence import Handle, Sequence
from drafter.errors import EngineError, QueueFullError
from drafter.requests import Request


def waiting(queue: WaitingQueue, *timeouts: float | None) -> list[Sequence]:
    """Put a request with each of these time limits into the queue."""
    slots = []
    for timeout in timeouts:
        handle = Handle(Request([5], timeout=timeout), stream=False, on_cancel=queue.look_again)
        slots.append(Sequence(handle, frozenset(), None, ExactVerifier(), max_length=8))
        queue.put(slots[-1])
    return slots


def fits(sequence: Sequence) -> bool:
    return True


def test_none_overtakes_one_that_does_not_fit() -> None:
    queue = WaitingQueue(limit=2)
    first, second = waiting(queue, None, None)
    assert queue.take(lambda sequence: sequence is second) is None
    assert queue.take(lambda sequence: sequence is first) is first


def test_requests_leave_in_their_order_and_those_put_back_go_first() -> None:
    queue = WaitingQueue(limit=3)
    first, second, third = waiting(queue, None, None, None)
    assert [queue.take(fits), queue.take(fits)] == [first, second]
    queue.put_back([first, second])
    assert [queue.take(fits) for _ in range(4)] == [first, second, third, None]


def test_the_limit_holds_for_new_requests_only() -> None:
    queue = WaitingQueue(limit=2)
    slots = waiting(queue, None, None)
    with pytest.raises(QueueFullError, match="2 requests"):
        waiting(queue, None)
    queue.take(fits)
    waiting(queue, None)
    queue.put_back(slots[:1])
    assert len(queue) == 3


def test_unwanted_requests_are_taken_out_wherever_they_stand() -> None:
    queue = WaitingQueue(limit=9)
    slots = waiting(queue, None, 50.0, None, 10.0)
    now = slots[3].handle.deadline
    assert queue.take_unwanted(-math.inf) == []
    assert queue.take_unwanted(now) == [slots[3]]
    slots[2].handle.cancel()
    assert queue.take_unwanted(now) == [slots[2]]
    assert queue.take_unwanted(slots[1].handle.deadline) == [slots[1]]
    assert queue.take(fits) is slots[0]


def test_a_closed_queue_refuses_with_the_reason() -> None:
    queue = WaitingQueue(limit=9)
    slots = waiting(queue, None, None)
    assert queue.close(EngineError("gone")) == slots
    assert queue.take(fits) is None
    with pytest.raises(EngineError, match="gone"):
        waiting(queue, None)


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
    assert steps_until(limit, 2) == row_limit._LONGEST_BACKOFF


def test_memory_that_reaches_lets_in_no_more_than_there_are_slots() -> None:
    limit = RowLimit(1)
    limit.reached()
    assert limit.most == 1
