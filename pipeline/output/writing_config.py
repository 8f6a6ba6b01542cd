"""The settings `writing.*`: how results are written."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.command_line import at_least


@dataclass(frozen=True)
class WritingConfig:
    """How results are written.

    Args:
        rows_per_file: Rows of an output file; also what is committed at once and done again after a failure.
        per_step_accepted: Write how many draft tokens each step of a row accepted.
        compact_mb: At the end, merge files of results until each has this many megabytes; by default they stay as they
            are.
    """

    rows_per_file: int = 128
    per_step_accepted: bool = True
    compact_mb: float | None = None

    def __post_init__(self) -> None:
        at_least("writing.rows_per_file", self.rows_per_file, 1)
        at_least("writing.compact_mb", self.compact_mb, 0, above=True)
