"""Errors of jobs, by the one who can act on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafter.errors import RequestError, without_secrets

ProblemType = Literal[
    "BadRow",
    "BadRequest",
    "BadPrompt",
    "BadSampling",
    "Refused",
    "TimedOut",
    "NotFinite",
    "EngineDied",
    "ProgramFailed",
    "ImageUnavailable",
]
"""Reasons for which a row cannot be generated.

`BadRow`: invalid record. `BadRequest`: invalid line of an OpenAI batch. `BadSampling`: invalid settings of its own.
`Refused`: by the engine. `NotFinite`: the target model's activations overflow. `EngineDied`: engines died with it.
`ProgramFailed`: the user's function raised an error, or returned what is no columns. `ImageUnavailable`: an image
cannot be fetched, or has changed since rows were read; the next submission generates the row again.
"""


class InputError(ValueError):
    """The configuration or the input cannot be used: exit code 2. One line: which input, what is wrong, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


class JobError(RuntimeError):
    """The job failed on the way: exit code 1. Committed results stay."""


class NoClusterError(JobError):
    """No Ray cluster can be reached, so that nothing has begun: exit code 1."""


class JobStopped(KeyboardInterrupt):
    """The job was told to stop: exit code 143, as for any process ended by SIGTERM. Committed results stay.

    Ray's compiled code, where the main thread waits, lets only a KeyboardInterrupt through.
    """


class UnavailableError(RequestError):
    """A request that may be generated at another time: a file that it names cannot be fetched now, or has changed."""


class RowError(ValueError):
    """One row cannot be generated; the others are unharmed."""

    def __init__(self, kind: ProblemType, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.problem = RowProblem(kind, message, attempts=attempts)


@dataclass(frozen=True)
class RowProblem:
    """A row's entry in `errors/`; `input` is the row as in the file, where it is no record and so has no columns."""

    type: ProblemType
    message: str
    input: str | None = None
    attempts: int = 0
