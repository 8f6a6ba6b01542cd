"""What fails again and again is tried ever more rarely: the pause before each try is longer than the one before."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 2
"""So many times the pause doubles."""


@dataclass
class Pause:
    """The steps until something is tried again.

    Args:
        left: How many are left.
        failures: Pauses that count towards the length of the next one.
    """

    left: int = 0
    failures: int = 0

    def begin(self, steps: int, longest: int) -> None:
        """Begin a pause of so many steps after a first failure; more after others, but at most `longest`."""
        self.left = min(steps << self.failures, longest)
        self.failures = min(self.failures + 1, _MOST_DOUBLINGS)

    def step(self) -> None:
        """Make one of the steps."""
        self.left = max(self.left - 1, 0)

    def forget(self) -> None:
        """Let there be no pause, nor a longer one next time."""
        self.left = self.failures = 0
