"""Assigns sequences to slots: the waiting queue, admission, chunks of prompts, parking, preemption."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence as Several

from drafter.engine.batch import BatchState
from drafter.engine.kept_rows import Donors, KeptRow, KeptRows, common_border
from drafter.engine.memory import GPU_CHUNK
from drafter.engine.row_limit import RowLimit
from drafter.engine.sequence import Sequence, Status
from drafter.engine.step import Flights
from drafter.engine.waiting_queue import WaitingQueue
from drafter.errors import EngineError

CHUNK = 512  # prompt tokens of one forward, and about as many as a step reads while a sequence is streamed, on a CPU
_SCORED_CHUNK = 256  # the same where the logits of all tokens are kept
_BACKGROUND_PIECES = 8
"""Forwards for as much of background prompts. A request that comes meanwhile waits for one, which then takes about as
long as a step of 32 rows; 32 prompts take the same processor time as in one forward (5.2 s, SmolLM2-135M)."""
_PATIENCE = 2  # steps that sequences wait for others to enter with them


class Scheduler:
    """Assigns sequences to slots, and keeps the batch state in step.

    `flights` tell how far the device may be ahead of the host; `max_queue` sequences may wait.
    """

    def __init__(self, state: BatchState, flights: Flights, max_queue: int) -> None:
        self._state, self._flights = state, flights
        self.in_slots: list[Sequence] = []  # in the slots' order: those that are decoded, then those that enter
        self.parked: list[Sequence] = []  # those that no step decodes
        self._held: dict[int, Sequence] = {}  # those of them with their KV, by slot: any behind `in_slots`
        self.kept = KeptRows(state)
        self.waiting = WaitingQueue(max_queue)
        self.background = WaitingQueue(max_queue)  # requests that enter only while there are no others
        self.limit = RowLimit(state.slots)
        self._waited = 0  # steps for which sequences that could enter have waited for others
        self.chunk = GPU_CHUNK if state.base.device.type == "cuda" else CHUNK  # prompt tokens of one forward

    @property
    def active(self) -> list[Sequence]:
        """Those that are decoded, in the first slots."""
        return [sequence for sequence in self.in_slots if sequence.status is Status.DECODED]

    @property
    def entering(self) -> list[Sequence]:
        """Those whose prompts are being read, in the slots behind."""
        return [sequence for sequence in self.in_slots if sequence.status is Status.READ]

    @property
    def has_foreground(self) -> bool:
        """True if a request is decoded, enters or waits that is no background one: those then rest."""
        if self.waiting or any(not one.background for one in self.in_slots):
            return True
        return any(not (one.background or one.handle.parked) for one in self.parked)

    def queue(self, *, background: bool) -> WaitingQueue:
        return self.background if background else self.waiting

    @property
    def _next(self) -> WaitingQueue:
        """The queue of those that may enter now."""
        return self.queue(background=not self.has_foreground)

    @property
    def parked_to_look_at(self) -> bool:
        """True if a parked sequence is no longer wanted, or no longer to be parked."""
        now = time.monotonic()
        return bool(self._to_go_on) or any(one.handle.unwanted(now) for one in self.parked)

    def parked_seconds(self, now: float) -> float | None:
        """Return the seconds until the first parked sequence is out of time; None for none."""
        first = min((one.handle.deadline for one in self.parked), default=math.inf)
        return None if first == math.inf else max(first - now, 0.0)

    @property
    def has_company(self) -> bool:
        """True if a sequence is streamed, or there are several salts: none must stand still for others' prompts."""
        if any(sequence.handle.streams for sequence in self.active):
            return True
        queue = self._next
        return queue.salted and len({*queue.salts, *(one.salt for one in self.in_slots)}) > 1

    def slots_of(self, sequences: Several[Sequence]) -> list[int]:
        slots = {id(sequence): slot for slot, sequence in enumerate(self.in_slots)}
        return [slots[id(sequence)] for sequence in sequences]

    def begin_step(self) -> None:
        """Count a step, for those that wait for others; see `admit`."""
        self._waited = self._waited + 1 if self._coming else 0

    @property
    def _coming(self) -> int:
        return min(len(self._next), self.limit.most - len(self.in_slots))

    def admit(self, *, packs: bool) -> bool:
        """Give slots to the sequences whose prompts the next forward reads, several if it `packs`; False for none.

        A forward reads the weights once for all of its prompts. So sequences wait until they are as many as a quarter
        of the slots, or for two steps, but not where somebody looks on: one is streamed, or there are several salts.
        """
        self.give_way()
        looks_on = self.has_company or self._next.streamed
        waits = self.active and packs and 4 * self._coming < self.limit.most and self._waited <= _PATIENCE
        if not self.entering and ((waits and not looks_on) or not self._enter()):
            return False
        unread = sum(sequence.unread for sequence in self.entering)
        while packs and unread < self._forward_tokens and self._enter():
            unread += self.entering[-1].unread
        return True

    @property
    def _forward_tokens(self) -> int:
        entering = self.entering
        return self.chunk // (_BACKGROUND_PIECES if entering and entering[0].background else 1)

    def _enter(self) -> bool:
        """Give the next waiting sequence the slot behind all others; False if there is none, no slot or no memory."""
        slot, queue = len(self.in_slots), self._next
        sequence = queue.first(self.in_slots) if slot < self.limit.most else None
        if sequence is None:
            return False
        self._vacate(slot)
        # None overtakes one that does not fit.
        while not self._has_room(sequence):
            if not self._held:
                return False
            self._drop(next(reversed(self._held)))
        queue.remove(sequence)
        self._waited = 0
        # It is in a list before anything can fail, so that a failure finds it.
        self._append(sequence)
        sequence.enter()
        self._state.reserve(slot, sequence.length + 1)
        self._state.enter(slot, sequence.text, sequence.handle.request, sequence.limits)
        return True

    def next_spans(self) -> tuple[list[slice], int]:
        """Return the chunks of the first entering prompts for the next forward, of at most `chunk` tokens.

        A prefix shared with an active sequence, a kept row or what others have read of their prompts is copied from
        there, and a prompt waits for one that has more than half of it. The number of copied tokens comes second. Some
        have forwards of their own; see `Sequence.apart`.
        """
        spans: list[slice] = []
        copied = 0
        scored = bool(self.entering) and self.entering[0].handle.request.prompt_logprobs is not None
        room = min(_SCORED_CHUNK, self._forward_tokens) if scored else self._forward_tokens
        donors, before = Donors(), Donors()
        for slot, sequence in enumerate(self.active):
            donors.add(slot, sequence, len(sequence.key.ids) - 1)
        for row in self.kept:
            donors.add(row.slot, row, len(row))
        for slot, sequence in enumerate(self.entering, len(self.active)):
            source, donor, shared = 0, None, 0
            if not (sequence.read or sequence.alone):
                source, donor, shared = donors.longest_shared(sequence)
            start = max(sequence.read, shared)
            rest = sequence.length - start
            if sequence.read:
                donors.add(slot, sequence, min(sequence.read, len(sequence.key.ids) - 1))
            if spans:
                coming = 0 if sequence.alone else before.longest_shared(sequence)[2]
                apart = sequence.apart or self.entering[0].apart
                if apart or not room or not rest or coming - start > rest / 2:
                    break
            if donor is not None:
                shared = self._state.copy(source, slot, common_border(shared, sequence, donor))
                start = max(sequence.read, shared)
                rest = sequence.length - start
                if shared:
                    sequence.copied(shared)
                if isinstance(donor, KeptRow):
                    self.kept.use(donor)
                copied += shared
            stop = sequence.cut(start, start + min(room, rest))
            spans.append(slice(start, stop))
            before.add(slot, sequence, len(sequence.key.ids) - 1)
            room -= min(room, rest)
            if not rest:
                break
        return spans, copied

    def activate(self, spans: Several[slice]) -> None:
        """Note that `spans` of the first entering sequences are read; those read in full become active."""
        first = len(self.active)
        for slot, (sequence, span) in enumerate(zip(self.entering[: len(spans)], spans, strict=True), first):
            sequence.read = span.stop
            if not sequence.unread:
                self._state.begin(slot, sequence.length)
                sequence.status = Status.DECODED
        self._update_settings()

    def grow(self) -> bool:
        """Reserve memory for the next step of all active sequences, in order; False if it does not reach for all."""
        ahead = self._flights.ahead
        while not all(self._state.reserve(slot, one.length + ahead + 1) for slot, one in enumerate(self.active)):
            if self.kept.drop_oldest():
                continue
            if not self._held:
                return False
            self._drop(next(reversed(self._held)))
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        """Return whether there is memory for a sequence to enter, once as many kept rows as it takes are dropped."""
        while not (room := self._state.has_room(sequence.length + 1, len(self.in_slots))) and self.kept.drop_oldest():
            pass
        return room

    def give_way(self) -> None:
        """Put background sequences whose prompts are being read back to wait, if there are others."""
        if self.has_foreground:
            for sequence in reversed([one for one in self.entering if one.background]):
                self.put_back(sequence)

    @property
    def to_park(self) -> list[Sequence]:
        """The active sequences to be parked, the last slot first: its KV stays where it is, and then the next one's."""
        rest = self.has_foreground
        return [one for one in reversed(self.active) if one.handle.parked or (rest and one.background)]

    @property
    def _to_go_on(self) -> list[Sequence]:
        rest = self.has_foreground
        return [one for one in self.parked if not (one.handle.parked or (rest and one.background))]

    def next_to_unpark(self) -> Sequence | None:
        """Return a parked sequence that is to go on, so that few have to move: in the next slot, or in the last one."""
        target, slots = len(self.in_slots), {id(one): slot for slot, one in self._held.items()}

        def place(sequence: Sequence) -> float:
            slot = slots.get(id(sequence), -1)
            return math.inf if slot == target else slot

        return max(self._to_go_on, key=place, default=None)

    def park(self, sequence: Sequence) -> None:
        """Take an active sequence out of the steps, with its KV kept if a slot is free. No flight may be under way."""
        slot, free = self.in_slots.index(sequence), self._free
        if slot == len(self.in_slots) - 1:  # the last of all stays where it is
            self.in_slots.pop()
            sequence.leave(slot)  # it may lose the slot later, and then enters another one from the beginning
            self._hold(sequence, slot)
            self._update_settings()
        elif free:
            self._move(sequence, slot, free[-1])
            self.take_out(sequence)
            self._hold(sequence, free[-1])
        else:
            self.take_out(sequence)
        sequence.status = Status.PARKED
        self.parked.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Let a parked sequence enter: at once if its KV was kept, or else it waits, and reads its text again."""
        target = len(self.in_slots)
        slot = next((slot for slot, one in self._held.items() if one is sequence), None)
        if slot is not None and target >= self.limit.most:
            self._drop(slot)
            slot = None
        self.parked.remove(sequence)
        if slot is None:
            sequence.status = Status.WAITING
            self._wait_again([sequence])
            return
        if slot != target:
            self._vacate(target)
            self._move(sequence, slot, target)
            self._state.end(slot)
        del self._held[slot]
        sequence.read = sequence.length
        self._append(sequence)

    @property
    def _free(self) -> list[int]:
        """Slots behind all sequences in which none is parked."""
        return [slot for slot in range(len(self.in_slots), self._state.slots) if slot not in self._held]

    def _append(self, sequence: Sequence) -> None:
        """Put a sequence that enters behind the others."""
        sequence.status = Status.READ
        self.in_slots.append(sequence)

    def _hold(self, sequence: Sequence, slot: int) -> None:
        self._state.begin(slot, self._state.max_length)  # it counts as full, like an empty slot
        self._held[slot] = sequence

    def _vacate(self, slot: int) -> None:
        """Let a sequence that is parked in a slot go to another one, or lose its KV."""
        if slot not in self._held:
            return
        if free := self._free:
            sequence = self._held.pop(slot)
            self._move(sequence, slot, free[-1])
            self._state.end(slot)
            self._hold(sequence, free[-1])
        else:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        """Give up the slot of a parked sequence."""
        if not self._held.pop(slot).proven:
            self._state.clear(slot)
        self._state.end(slot)

    def over_share(self) -> Sequence | None:
        """Return the sequence to preempt for one that waits and has a right to its slot; None for none.

        It is the youngest of the salt with the most slots, if that has two more than the salt of the one that waits.
        """
        queue = self._next
        waiting = queue.first(self.in_slots) if queue.salted else None
        taken = len(self.in_slots)
        if waiting is None or (taken < self.limit.most and self._has_room(waiting)):
            return None
        held = Counter(sequence.salt for sequence in self.in_slots)
        greediest = max(held, key=held.__getitem__, default="")
        return self.youngest(greediest) if held[greediest] >= held[waiting.salt] + 2 else None

    def youngest(self, salt: str | None = None) -> Sequence:
        """Return the sequence that has entered last, of all or of a salt."""
        some = [sequence for sequence in self.in_slots if salt in (None, sequence.salt)]
        return max(some, key=lambda sequence: sequence.handle.submitted + (sequence.timing.queued or 0.0))

    def put_back(self, sequence: Sequence) -> None:
        """Preempt a sequence. No flight may be under way."""
        self.take_out(sequence)
        self._wait_again([sequence])

    def _wait_again(self, sequences: Several[Sequence]) -> None:
        for background in (False, True):
            own = [one for one in sequences if one.background is background]
            self.queue(background=background).put_back(own)

    def end(self, sequence: Sequence) -> None:
        """Take an active sequence out whose text is over, and keep what its slot has."""
        self.kept.keep(self.in_slots.index(sequence), sequence)
        self.take_out(sequence)

    def take_out(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Take a sequence out of its slot: the last active one takes the slot of one, and those that enter move up.

        A `poisoned` slot holds numbers that are not finite.
        """
        slot = gap = self.in_slots.index(sequence)
        rows, entering = list(self.in_slots), sequence.status is Status.READ
        if not entering:
            gap = len(self.active) - 1
            rows[slot] = rows[gap]
        sequence.leave(slot)
        if entering or poisoned or not sequence.proven:
            self._state.clear(slot)
        moves = [(rows[slot], gap, slot)] if gap != slot else []
        moves += [(one, place, place - 1) for place, one in enumerate(rows[gap + 1 :], gap + 1)]
        for move in moves:
            self._move(*move)
        # Last, so that a failure finds all of them if a move fails.
        self.in_slots = rows[:gap] + rows[gap + 1 :]
        self._state.end(len(self.in_slots))
        self._update_settings()

    def read_again(self, sequence: Sequence) -> None:
        """Put a sequence back to wait, and read its text again with nothing copied from others."""
        self.take_out(sequence, poisoned=True)
        sequence.stay += 1
        self._wait_again([sequence])

    def take_unwanted(self, now: float) -> list[Sequence]:
        """Take out all that are cancelled, or out of time at `now` (monotonic seconds)."""
        unwanted = [sequence for sequence in self.in_slots if sequence.handle.unwanted(now)]
        for sequence in reversed(unwanted):
            if sequence.status is Status.DECODED:
                self.end(sequence)
            else:
                self.take_out(sequence)
        for sequence in [one for one in self.parked if one.handle.unwanted(now)]:
            for slot in [slot for slot, one in self._held.items() if one is sequence]:
                self._drop(slot)
            self.parked.remove(sequence)
            unwanted.append(sequence)
        return [*unwanted, *self.waiting.take_unwanted(now), *self.background.take_unwanted(now)]

    def preempt(self) -> int:
        """Put half of the sequences, and all that enter, back to wait; return how many. No flight may be under way."""
        self.kept.clear()
        self.limit.ran_out(len(self.in_slots))
        left = self.active[: self.limit.most]
        back = self.in_slots[len(left) :]
        for slot, sequence in enumerate(back, len(left)):
            sequence.leave(slot)
            self._state.clear(slot)
        self.in_slots = left
        self._update_settings()
        for slot in tuple(self._held):
            self._state.clear(slot)
            self._drop(slot)
        self._state.restore([one.text for one in left], [one.handle.request for one in left])
        self._wait_again(back)
        return len(back)

    def look_again(self) -> None:
        """Note that a request has been cancelled, which may be one that waits."""
        self.waiting.look_again()
        self.background.look_again()

    def close(self, error: EngineError) -> list[Sequence]:
        """Give up all slots and refuse later requests with `error`; return all sequences that there were."""
        return [*self.clear(), *self.waiting.close(error), *self.background.close(error)]

    def clear(self) -> list[Sequence]:
        """Give up all slots; return the sequences that had one."""
        gone = [*self.in_slots, *self.parked]
        self.in_slots, self.parked, self._held = [], [], {}
        for sequence in gone:
            sequence.leave(None)
        return gone

    def _move(self, sequence: Sequence, source: int, target: int) -> None:
        self._state.move(source, target, sequence.length + 1 + self._flights.ahead)
        if not sequence.proven:
            self._state.clear(source)

    def _update_settings(self) -> None:
        self._state.expect(sequence.sampling for sequence in self.active)
