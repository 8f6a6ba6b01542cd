"""Where the engine's time goes, as running sums that cost nothing to keep."""

from __future__ import annotations

import time

STAGES = ("prefill", "draft", "tree", "verify", "commit", "wait", "host")
"""Stages of a step.

`prefill` reads prompts; `draft` runs the drafter's own network and `tree` searches the tree of what it says; `verify`
is the base's forward and the verifier's decision; `commit` moves what was accepted; `wait` waits for the device; `host`
is all that the host does by itself.
"""


class StageTimes:
    """Seconds of the host's clock in each stage.

    A GPU works while the host goes on. There `draft` is only what a drafter prepares on the host, `verify` is the time
    to queue a whole step, and `wait` is what is left of the step before when that is done.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin a step: the time since the last one counts for no stage."""
        self._since = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Count the time since the last mark as `stage`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now
