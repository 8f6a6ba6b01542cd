"""Where to copy the state of a text's beginning from: other rows, and rows that have ended but keep a slot for that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from drafter.engine.batch import BatchState
from drafter.engine.sequence import Sequence
from drafter.prompt import TextKey
from drafter.target_model.sight import Borders

LEAST_SHARED = 8  # shorter common prefixes are computed again: that costs no more than to copy them


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A text of which all tokens have been read, in a slot that no step decodes."""

    slot: int
    key: TextKey
    borders: Borders | None  # where the text may be cut; None if everywhere

    def __len__(self) -> int:
        return len(self.key.ids)


class KeptRows:
    """The rows in the `kept_slots` of a batch state; that which was used last comes last."""

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._rows: list[KeptRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[KeptRow]:
        return iter(self._rows)

    def keep(self, slot: int, sequence: Sequence) -> None:
        """Move away what is in the slot of a sequence that ends, unless that is kept already."""
        if not self._state.kept_slots or not sequence.keepable:
            return
        text = sequence.text[: sequence.length]
        text = text[: self._state.cache.shareable(slot, len(text))]
        if len(text) < LEAST_SHARED:
            return
        key = sequence.handle.request.key(text)
        for row in tuple(self._rows):
            shared = key.shared(row.key)
            if shared == len(text):
                self.use(row)
                return
            if shared == len(row):
                self._drop(row)
        if len(self._rows) == len(self._state.kept_slots):
            self._drop(self._least_worth(key))
        taken = {row.slot for row in self._rows}
        target = next(one for one in self._state.kept_slots if one not in taken)
        self._state.keep(slot, target, len(text))
        self._rows.append(KeptRow(target, key, sequence.borders))

    def use(self, row: KeptRow) -> None:
        """Note that a row has been copied from."""
        self._rows.remove(row)
        self._rows.append(row)

    def drop_oldest(self) -> bool:
        """Give up the row that was used longest ago; False if there is none."""
        if self._rows:
            self._drop(self._rows[0])
            return True
        return False

    def clear(self) -> None:
        """Give up all rows."""
        while self.drop_oldest():
            pass

    def _least_worth(self, key: TextKey) -> KeptRow:
        """Return the row to drop for another one, of the salt that would have most.

        A row that has half of its text in common with the new one goes first: otherwise many texts of one beginning
        drive out all other beginnings.
        """
        held = Counter([key.salt, *(row.key.salt for row in self._rows)])
        most = max(held[row.key.salt] for row in self._rows)
        some = [row for row in self._rows if held[row.key.salt] == most]
        return next((row for row in some if 2 * key.shared(row.key) >= len(row)), some[0])

    def _drop(self, row: KeptRow) -> None:
        self._rows.remove(row)
        self._state.cache.blocks.release(row.slot)


class Donors:
    """Rows by the beginnings of their texts: there may be hundreds, and most have nothing in common."""

    def __init__(self) -> None:
        self._of = defaultdict[tuple[str, bytes], list[tuple[int, Sequence | KeptRow, int]]](list)

    def add(self, slot: int, row: Sequence | KeptRow, length: int) -> None:
        """Add a row of which the first `length` tokens are in its slot, or will be."""
        self._of[row.key.beginning(LEAST_SHARED)].append((slot, row, length))

    def longest_shared(self, sequence: Sequence) -> tuple[int, Sequence | KeptRow | None, int]:
        """Return slot and row with the longest common prefix, and its length in tokens; 0 for none."""
        longest: tuple[int, Sequence | KeptRow | None, int] = (0, None, 0)
        key = sequence.key
        for slot, row, length in self._of[key.beginning(LEAST_SHARED)]:
            # The last token is pending: it is decoded, not copied.
            shared = min(key.shared(row.key), len(key.ids) - 1, length)
            if shared > longest[2]:
                longest = slot, row, shared
        return longest if longest[2] >= LEAST_SHARED else (0, None, 0)


def common_border(place: int, *rows: Sequence | KeptRow) -> int:
    """Return the last place up to this one where the texts of all these may be cut; see `Borders`."""
    least = min(place if one.borders is None else one.borders.before(place) for one in rows)
    return place if least == place else common_border(least, *rows)
