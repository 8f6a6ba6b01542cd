"""Errors of jobs, by the one who can act on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProblemType = Literal[
    "BadRow", "BadRequest", "BadPrompt", "BadSampling", "Refused", "TimedOut", "NotFinite", "EngineDied"
]
"""Reasons for which a row cannot be generated.

`BadRow`: invalid record. `BadRequest`: invalid line of an OpenAI batch. `BadPrompt`: invalid prompt. `BadSampling`:
invalid settings of its own. `Refused`: refused by the engine. `TimedOut`: exceeded its time limit. `NotFinite`: the
target model's activations overflow on it. `EngineDied`: engines died with it too often.
"""


class InputError(ValueError):
    """The configuration or the input cannot be used: exit code 2. One line: which input, what is wrong, what to do."""


class JobError(RuntimeError):
    """The job failed on the way: exit code 1. Committed results stay."""


class JobStopped(RuntimeError):  # noqa: N818 - stopping a job is no error
    """The job was told to stop: exit code 143, as for any process ended by SIGTERM. Committed results stay."""


class RowError(ValueError):
    """One row cannot be generated; the others are unharmed."""

    def __init__(self, kind: ProblemType, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.kind, self.attempts = kind, attempts

    @property
    def problem(self) -> RowProblem:
        """The row's entry in `errors/`."""
        return RowProblem(self.kind, str(self), attempts=self.attempts)


@dataclass(frozen=True)
class RowProblem:
    """A row's entry in `errors/`.

    Args:
        input: The row as in the file, where it is no record and has no columns to keep it.
    """

    type: ProblemType
    message: str
    input: str | None = None
    attempts: int = 0
