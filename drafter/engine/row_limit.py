"""How many rows an engine decodes together after its memory has run out."""

from __future__ import annotations

_BACKOFF, _LONGEST_BACKOFF = 256, 1 << 16  # steps with enough memory until one more sequence is admitted


class RowLimit:
    """Limits the sequences in slots after memory has run out: additive increase, multiplicative decrease (Chiu and
    Jain 1989).

    The limit `most` is halved, then raised one by one: later texts may be shorter, or sample in another way. Each
    failure doubles the wait before the next try, because a failed try costs the prompts of half of the sequences.
    """

    def __init__(self, slots: int) -> None:
        self._slots = self.most = slots
        self._backoff, self._left = _BACKOFF // 2, 0

    def ran_out(self, rows: int) -> None:
        """Allow half of `rows`, after their step ran out of memory."""
        self.most = (rows + 1) // 2
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF)
        self._left = self._backoff

    def reached(self) -> None:
        """Count a step that had enough memory; allow one more row after the back-off."""
        if self.most == self._slots:
            return
        self._left -= 1
        if not self._left:
            self.most += 1
            self._left = self._backoff
