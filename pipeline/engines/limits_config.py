"""The settings `limits.*`: when a row, a step or a stop is given up."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.command_line import at_least


@dataclass(frozen=True)
class LimitsConfig:
    """What is given up, and when.

    Args:
        row_attempts: A row that was in an engine at this many deaths of its process is set aside with an error; at the
            last ones it had the engine to itself.
        row_seconds: A row that an engine has had for this long gets an error; by default there is no limit.
        step_seconds: A step of an engine that takes longer than this hangs, and the engine's process is ended.
        drain_seconds: After SIGTERM, rows that have begun may go on for this long.
    """

    row_attempts: int = 4
    row_seconds: float | None = None
    step_seconds: float = 600.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        at_least("limits.row_attempts", self.row_attempts, 2)
        at_least("limits.row_seconds", self.row_seconds, 0, above=True)
        at_least("limits.step_seconds", self.step_seconds, 0, above=True)
        at_least("limits.drain_seconds", self.drain_seconds, 0)
