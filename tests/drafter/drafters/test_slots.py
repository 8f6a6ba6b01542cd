"""A drafter's state for each slot follows the sequences, and nothing of an old one reaches a new one."""

from __future__ import annotations

import torch

from drafter.drafters.contract import DraftContext
from drafter.drafters.slots import NO_TEXT, SlotObjects, SlotTensors
from drafter.target_model.cache import Rows

SLOTS, LENGTH = 3, 20


def context_of(lengths: list[int], ahead: int = 0) -> DraftContext:
    tokens = torch.zeros(len(lengths), LENGTH, dtype=torch.long)
    return DraftContext(tokens, None, torch.tensor(lengths), lengths, ahead)


def test_rows_with_many_new_tokens_are_read_at_once() -> None:
    entries = SlotTensors(Rows([torch.zeros(SLOTS, LENGTH)]), usual=4, behind=2)
    late, unread = entries.advance(context_of([3, 9, 4]))
    assert (late.tolist(), unread.tolist()) == ([1, 2], [10, 5])
    assert entries.new.tolist() == [4, 1, 1]  # the pending token of each, and what an ordinary step reads
    late, _ = entries.advance(context_of([5, 9]))
    assert (late.tolist(), entries.new.tolist(), entries.known) == ([], [2, 1], [6, 10, 5])
    late, unread = entries.advance(context_of([5, 9], ahead=4))
    assert (late.tolist(), entries.new.tolist()) == ([], [4, 4])


def test_entries_are_copied_as_far_as_they_are_known_and_shared() -> None:
    numbers, more = torch.arange(60.0).view(SLOTS, LENGTH), torch.randn(SLOTS, LENGTH, 2)
    entries = SlotTensors(Rows([numbers, more]), usual=4, behind=2)
    entries.advance(context_of([5, 9]))
    entries.copy(1, 2, 7)
    assert (numbers[2, :7].tolist(), numbers[2, 7].item()) == (list(range(20, 27)), 47.0)
    assert torch.equal(more[2, :7], more[1, :7])
    entries.copy(0, 2, 9)
    assert entries.known == [6, 10, 6]
    entries.move(1, 0)
    assert numbers[0, :10].tolist() == list(range(20, 30))
    assert entries.known[0] == 10


def test_numbers_that_are_not_finite_stay_with_their_sequence() -> None:
    """Also those written behind the known tokens, and those behind a shorter sequence that takes the slot."""
    numbers = torch.zeros(SLOTS, LENGTH)
    entries = SlotTensors(Rows([numbers]), usual=4, behind=2)
    entries.advance(context_of([5, 9]))
    numbers[1, :16] = torch.nan
    entries.move(0, 1)
    assert bool(numbers.isfinite().all())
    numbers[1, :12] = torch.nan
    entries.enter(1, NO_TEXT)
    assert bool(numbers.isfinite().all())
    assert entries.known == [6, 0, 0]


def test_objects_are_told_of_the_end_of_their_sequence() -> None:
    ended: list[list[int]] = []
    objects = SlotObjects(2, lambda text, request: text.tolist(), ended.append)
    objects.rows[0] += [1, 2]
    objects.rows[1] += [3]
    objects.move(1, 0)
    assert (objects.rows, ended) == ([[3], []], [[1, 2]])
    objects.enter(0, NO_TEXT)
    assert (objects.rows, ended[-1]) == ([[], []], [3])
