"""What can go wrong with a job, by who can do something about it."""

from __future__ import annotations

from dataclasses import dataclass


class InputError(ValueError):
    """The configuration or the input cannot be used: exit code 2. One line: which input, what is wrong, what to do."""


class JobError(RuntimeError):
    """The job failed on the way: exit code 1. What it has committed stays."""


class JobStopped(RuntimeError):  # noqa: N818 - it is no error
    """The job was told to stop: exit code 143, as of any process that SIGTERM ends. What it has committed stays."""


class RowError(ValueError):
    """One row cannot be generated; the others are unharmed.

    Args:
        kind: `BadRow` (not a record), `BadPrompt`, `BadSampling` (its own settings), `Refused` (by the engine),
            `TimedOut`, or `EngineDied` (with it, too often).
        message: What is wrong with it.
        attempts: How often an engine had it.
    """

    def __init__(self, kind: str, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.kind, self.attempts = kind, attempts

    @property
    def problem(self) -> RowProblem:
        """What goes with the row."""
        return RowProblem(self.kind, str(self), attempts=self.attempts)


@dataclass(frozen=True)
class RowProblem:
    """Why a row goes to `errors/`.

    Args:
        type: See `RowError`.
        message: What is wrong with it.
        input: The row as it stood in the file, where that is not a record; otherwise its columns tell.
        attempts: How often an engine had it.
    """

    type: str
    message: str
    input: str | None = None
    attempts: int = 0
