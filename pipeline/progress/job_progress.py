"""How far a job is, at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafter.statistics import BatchChoice, DecodeCounts, mean_acceptance_length, per_second
from pipeline.progress.reports import EngineFacts, LearningReport

State = Literal["starting", "generating", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Progress:
    """How far the job is.

    Args:
        state: What it is doing, or how this submission ended.
        total: Rows of the input.
        before: Rows that earlier submissions finished, errors included.
        errors_before: Errors among them.
        rows: Rows that this submission has done, errors included.
        errors: Errors among them.
        tokens: New tokens of this submission's rows.
        steps: Decode steps of this submission's rows.
        seconds: From the first engine's first report to the last row.
        recent_row_rate: Rows of this submission a second, over the last ten minutes: what is left is estimated by it.
        engines: Engines at work.
        slots: Sequences that they decode together at most.
        active: Sequences that they decode now.
        waiting: Requests that wait for a slot.
        memory_tokens: Tokens of texts that their drafters remember.
        memory_bytes: Bytes that these memories take.
        choices: What the engines have chosen to draft with, by batch size.
        engine_seconds: Seconds that all engines have existed, ended ones included.
        device: The devices that the engines run on.
        facts: What the engines decode with, once one has loaded its models.
        failure: Why an engine could not load its models, or why the job ended.
        crash: Why an engine's process ended last.
        stage: What is done while it starts, in words for people.
        learning: What the job's learner does; None without one.
    """

    state: State = "starting"
    total: int | None = None
    before: int = 0
    errors_before: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    recent_row_rate: float = 0.0
    engines: int = 0
    slots: int = 0
    active: int = 0
    waiting: int = 0
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()
    engine_seconds: float = 0.0
    device: str | None = None
    facts: EngineFacts | None = None
    failure: str | None = None
    crash: str | None = None
    stage: str = "starting"
    learning: LearningReport | None = None

    @property
    def done(self) -> int:
        """Rows done by all submissions."""
        return self.before + self.rows

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of this submission; see `per_second`."""
        return per_second(self.tokens, self.seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows a second of this submission, errors included."""
        return per_second(self.rows, self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length of this submission's finished rows, in tokens per step."""
        return mean_acceptance_length(DecodeCounts(num_output_tokens=self.tokens, num_decode_steps=self.steps))

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end at the present rate; None while there is no rate.

        Rows of earlier submissions are done, but tell nothing about how fast this one is.
        """
        if self.total is None:
            return None
        left = self.total - self.done
        if left <= 0:
            return 0.0
        return left / self.recent_row_rate if self.recent_row_rate > 0 else None


def ending(error: BaseException | None) -> State:
    """Return how a `with` block has ended that `error` left."""
    return "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"
