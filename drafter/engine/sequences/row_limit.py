"""How many sequences may be in slots together after memory has run out: half as many, then more again, one by one.

That is additive increase and multiplicative decrease (Chiu and Jain 1989), as where many share a line. What did not fit
once may fit later: texts are shorter, or sample in another way. Each time that it does not, the next try is put off for
twice as long, because a try that fails costs the prompts of half of the sequences.
"""

from __future__ import annotations

_PAUSE = 256
"""Steps without trouble until one more sequence is let in."""
_LONGEST_PAUSE = 1 << 16


class RowLimit:
    """Sequences that may be in slots together.

    Args:
        slots: All slots.

    Attributes:
        most: The limit of now.
    """

    def __init__(self, slots: int) -> None:
        self._slots = self.most = slots
        self._pause, self._left = _PAUSE // 2, 0

    def ran_out(self, rows: int) -> None:
        """Memory did not reach for so many sequences: allow half of them."""
        self.most = (rows + 1) // 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause

    def reached(self) -> None:
        """Memory has reached for a step: after a pause of such steps, allow one more."""
        if self.most == self._slots:
            return
        self._left -= 1
        if not self._left:
            self.most += 1
            self._left = self._pause
