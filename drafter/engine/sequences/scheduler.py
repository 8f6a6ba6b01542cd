"""Who waits, who enters, who is decoded, and in which slot: the one place that changes it.

Active sequences always fill slots `0..B-1`, so that a forward over them is a view of the buffers. Sequences whose
prompts are being read are in the slots behind them. When one leaves, the last active one takes its slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from drafter.engine.batch_state import BatchState
from drafter.engine.sequences.prefill import Piece
from drafter.engine.sequences.row_limit import RowLimit
from drafter.engine.sequences.sequence import Sequence
from drafter.engine.sequences.waiting_queue import WaitingQueue
from drafter.engine.steps.flights import Flights


class Scheduler:
    """Keeps the batch state in step with the lists of sequences.

    Args:
        state: What the device holds of them.
        flights: Tell how far the device may be ahead of the host.
        max_queue: Sequences that may wait.

    Attributes:
        active: Sequence of each slot that is decoded, in the slots' order.
        entering: Those whose prompts are being read, in the slots behind.
        waiting: Those without a slot.
        limit: Sequences that may be in slots together: all slots, or fewer for a while after memory ran out.
    """

    def __init__(self, state: BatchState, flights: Flights, max_queue: int) -> None:
        self._state, self._flights = state, flights
        self.active: list[Sequence] = []
        self.entering: list[Sequence] = []
        self.waiting = WaitingQueue(max_queue)
        self.limit = RowLimit(state.slots)

    @property
    def in_slots(self) -> list[Sequence]:
        """All that have a slot."""
        return [*self.active, *self.entering]

    def slots_of(self, sequences: Several[Sequence]) -> list[int]:
        """The slots of active sequences."""
        slots = {id(sequence): slot for slot, sequence in enumerate(self.active)}
        return [slots[id(sequence)] for sequence in sequences]

    def enter(self) -> bool:
        """Give the next sequence that waits the slot behind all others; False if there is none, no slot or no memory.

        A sequence that has been in a slot before comes with its output.
        """
        slot = len(self.active) + len(self.entering)

        def fits(sequence: Sequence) -> bool:
            return self._state.has_room(sequence.length + 1, slot)

        sequence = self.waiting.take(fits) if slot < self.limit.most else None
        if sequence is None:
            return False
        # It is in a list before anything can fail, so that a failure finds it.
        self.entering.append(sequence)
        sequence.enter()
        self._state.reserve(slot, sequence.length + 1)
        prompt = len(sequence.handle.request.prompt_ids)
        self._state.enter(slot, sequence.prefilled, sequence.sampling, prompt)
        return True

    def copy_shared(self, pieces: Several[Piece]) -> int:
        """Copy the beginnings that pieces share with active sequences; return how many tokens that saves."""
        for place, piece in enumerate(pieces):
            if piece.shared:
                self._state.copy(piece.donor, len(self.active) + place, piece.shared)
                self.entering[place].borrowed = True
        return sum(piece.shared for piece in pieces)

    def activate(self, pieces: Several[Piece]) -> None:
        """Note that `pieces` of the first sequences that enter are read: what has been read as a whole is decoded."""
        for sequence, piece in zip(self.entering[: len(pieces)], pieces, strict=True):
            sequence.read = piece.stop
            if not sequence.unread:
                self._state.begin(len(self.active), sequence.length)
                self.active.append(sequence)
                self.entering.remove(sequence)
        self._update_settings()

    def grow(self) -> bool:
        """Reserve memory for the next step of all active sequences, in order; False if it does not reach for all."""
        ahead = self._flights.ahead
        return all(self._state.reserve(slot, one.length + ahead + 1) for slot, one in enumerate(self.active))

    def put_youngest_back(self) -> None:
        """Put the sequence that has come last back to wait. No flight may be under way."""
        youngest = max(self.in_slots, key=lambda sequence: sequence.entered or 0.0)
        if youngest in self.entering:
            self._leave(youngest)
        else:
            self.retire(youngest)
        self.waiting.put_back([youngest])

    def retire(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Take an active sequence out: the last active one takes its slot, and those that enter move up.

        Args:
            sequence: The one that leaves.
            poisoned: Whether its slot holds numbers that are not finite.
        """
        slot, last = self.active.index(sequence), len(self.active) - 1
        if poisoned or not sequence.proven:
            self._state.clear(slot)
        if slot != last:
            self._move(self.active[last], last, slot)
        self._move_up(0)
        # Last, so that a failure finds all of them if a move fails.
        self.active[slot] = self.active[last]
        self.active.pop()
        self._state.end(last + len(self.entering))
        self._update_settings()

    def read_again(self, sequence: Sequence) -> None:
        """Put a sequence back to wait, and read its text again with nothing copied from others.

        A number that is not finite reaches all positions that are read in the same forward, so the slot that it copied
        from may have been spoilt by a part of the other text that this one does not have.
        """
        self.retire(sequence, poisoned=True)
        sequence.alone = True
        sequence.stay += 1
        self.waiting.put_back([sequence])

    def take_unwanted(self, now: float) -> list[Sequence]:
        """Take out all that are cancelled, or out of time at `now` (monotonic seconds)."""
        unwanted = [sequence for sequence in self.active if sequence.handle.unwanted(now)]
        for sequence in reversed(unwanted):
            self.retire(sequence)
        for sequence in reversed(self.entering):
            if sequence.handle.unwanted(now):
                self._leave(sequence)
                unwanted.append(sequence)
        return [*unwanted, *self.waiting.take_unwanted(now)]

    def preempt(self) -> int:
        """Put half of the sequences back to wait, and let no more be in slots for now; return how many went back.

        No flight may be under way. A sequence whose prompt is being read is not in its slot as a whole: it goes back.
        """
        self.limit.ran_out(len(self.in_slots))
        most = self.limit.most
        back = self.in_slots[min(most, len(self.active)) :]
        for slot in range(len(self.in_slots) - len(back), len(self.in_slots)):
            self._state.clear(slot)
        self.active, self.entering = self.active[:most], []
        self._update_settings()
        self._state.restore([sequence.text for sequence in self.active])
        self.waiting.put_back(back)
        return len(back)

    def clear(self) -> list[Sequence]:
        """Give up all slots; return who had one."""
        gone, self.active, self.entering = self.in_slots, [], []
        return gone

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that enters out: those behind it move up."""
        place = self.entering.index(sequence)
        self._state.clear(len(self.active) + place)
        self._move_up(place + 1)
        self._state.end(len(self.in_slots) - 1)
        self.entering.remove(sequence)

    def _move_up(self, place: int) -> None:
        """Let the sequences that enter, from this one of them on, each take the slot before theirs."""
        for slot, sequence in enumerate(self.entering[place:], len(self.active) + place):
            self._move(sequence, slot, slot - 1)

    def _move(self, sequence: Sequence, source: int, target: int) -> None:
        self._state.move(source, target, sequence.length + 1 + self._flights.ahead)
        if not sequence.proven:
            self._state.clear(source)

    def _update_settings(self) -> None:
        self._state.expect(sequence.sampling for sequence in self.active)
