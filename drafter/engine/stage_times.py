"""Where the engine's time goes, as running sums that cost nothing to keep."""

from __future__ import annotations

import time

STAGES = ("prefill", "draft", "verify", "commit", "wait", "host")
"""Stages of a step: prompts of new rows, the tree, the base's forward and the walk, moving what was accepted, waiting
for the outcome, and all that the host does by itself."""


class StageTimes:
    """Seconds of the host's clock in each stage.

    A GPU works behind the host's back: there, `draft` is what new rows bring a drafter, `verify` the time to queue a
    whole step, and `wait` what is left of the step before when that is done.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = 0.0

    def start(self) -> None:
        """A step begins."""
        self._since = time.perf_counter()

    def mark(self, stage: str) -> None:
        """What has happened since the last mark was `stage`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now
