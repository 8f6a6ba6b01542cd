"""The limit of rows after memory ran out, and the waiting queue."""

from __future__ import annotations

import math

import pytest

from drafter.engine import row_limit
from drafter.engine.handle import Handle
from drafter.engine.row_limit import RowLimit
from drafter.engine.sequence import Sequence
from drafter.engine.waiting_queue import WaitingQueue
from drafter.errors import EngineError, QueueFullError
from drafter.requests import Request


def waiting(queue: WaitingQueue, *timeouts: float | None, salt: str = "") -> list[Sequence]:
    """Put a request with each of these time limits into the queue."""
    slots = []
    for timeout in timeouts:
        handle = Handle(Request([5], timeout=timeout, salt=salt), stream=False, on_change=queue.look_again)
        slots.append(Sequence(handle, frozenset(), None, max_length=8))
        queue.put(slots[-1])
    return slots


def take(queue: WaitingQueue, in_slots: list[Sequence] | None = None) -> Sequence | None:
    """Take the request that is next."""
    if (first := queue.first(in_slots or [])) is not None:
        queue.remove(first)
    return first


def test_requests_leave_in_their_order_and_those_put_back_go_first() -> None:
    queue = WaitingQueue(limit=3)
    first, second, third = waiting(queue, None, None, None)
    assert [take(queue), take(queue)] == [first, second]
    queue.put_back([first, second])
    assert [take(queue) for _ in range(4)] == [first, second, third, None]


def test_salts_take_turns_and_those_with_fewer_slots_go_first() -> None:
    queue = WaitingQueue(limit=9)
    a, b, c, d = waiting(queue, *[None] * 4, salt="one")
    e, f = waiting(queue, None, None, salt="two")
    assert [take(queue) for _ in range(3)] == [a, e, b]
    assert [take(queue, [e]), take(queue, [e, b, c])] == [c, f]
    queue.put_back([a, b])
    assert [take(queue) for _ in range(4)] == [a, b, d, None]


def test_one_salt_may_fill_the_queue_and_keeps_no_other_out() -> None:
    queue = WaitingQueue(limit=4)
    waiting(queue, *[None] * 4, salt="one")
    waiting(queue, None, None, salt="two")
    for salt in ("one", "two"):
        with pytest.raises(QueueFullError, match="6 requests"):
            waiting(queue, None, salt=salt)
        with pytest.raises(QueueFullError):
            queue.refuse_full(salt)
    waiting(queue, None, salt="three")  # a third of four
    with pytest.raises(QueueFullError):
        waiting(queue, None, salt="three")
    for _ in range(4):
        take(queue)
    waiting(queue, None, salt="one")  # three wait
    assert len(queue) == 4


def test_the_limit_holds_for_new_requests_only() -> None:
    queue = WaitingQueue(limit=2)
    slots = waiting(queue, None, None)
    with pytest.raises(QueueFullError, match="2 requests"):
        waiting(queue, None)
    take(queue)
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
    assert take(queue) is slots[0]


def test_a_closed_queue_refuses_with_the_reason() -> None:
    queue = WaitingQueue(limit=9)
    slots = waiting(queue, None, None)
    assert queue.close(EngineError("gone")) == slots
    assert take(queue) is None
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
