"""What all drafters of heads share: they pass on what happens to the sequences to the reader of the head's module."""

from __future__ import annotations

from dataclasses import replace

from drafter.drafters.contract import DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.heads.modules.contract import SlotReader


class HeadDrafter(Drafter):
    """Keeps a reader informed.

    Args:
        spec: What the drafter needs; the reader says what it looks at and keeps.
        reader: What the head's module remembers.
    """

    def __init__(self, spec: DraftSpec, reader: SlotReader) -> None:
        self.spec = replace(spec, bounded=reader.bounded, bytes_per_token=reader.bytes_per_token)
        self._slots = reader

    def open(self, loan: Loan) -> None:
        """Make room for the module's memory."""
        self._times = loan.times
        self._slots.open(loan.slots, loan.length)

    def enter(self, slot: int, text: Ids) -> None:
        """Forget the sequence before: nothing of the new one has been read."""
        self._slots.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what was read of the common beginning."""
        self._slots.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move what was read of the sequence."""
        self._slots.move(source, target)

    def clear(self, slot: int) -> None:
        """Set what the module remembers of the slot to zero."""
        self._slots.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step brings."""
        self._slots.prepare(context)
