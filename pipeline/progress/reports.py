"""What engines report of themselves and of their parts.

A report replaces the earlier one of the same part or engine, so that neither repeated work nor a repeated report is
counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drafter.statistics import BatchChoice

BEAT_SECONDS = 2.0
"""Engines report their state this often."""


@dataclass(frozen=True)
class PartReport:
    """How much of a part is generated.

    Args:
        rows: Rows done, errors included.
        errors: Rows that could not be generated.
        tokens: New tokens of finished rows.
        steps: Decode steps that finished rows took part in.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0

    def plus(self, other: PartReport) -> PartReport:
        """Return the sum of both."""
        return PartReport(
            self.rows + other.rows,
            self.errors + other.errors,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    def minus(self, other: PartReport) -> PartReport:
        """Return what is left without `other`."""
        return self.plus(PartReport(-other.rows, -other.errors, -other.tokens, -other.steps))


@dataclass(frozen=True)
class EngineFacts:
    """What an engine decodes with; kept in `run.json`, as all engines of a job have the same.

    Args:
        base_fingerprint: Fingerprint of the base model.
        verifier: Name of the verifier, which decides which draft tokens are kept.
        lossless: Whether the tokens are exactly those of plain decoding.
        verifier_settings: The numbers that the verifier decides by, by name.
    """

    base_fingerprint: str
    verifier: str
    lossless: bool
    verifier_settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineReport:
    """The state of an engine.

    Args:
        seconds: Seconds since its process began to load the models.
        device: The device that it runs on, by its maker's name.
        facts: What it decodes with.
        slots: Sequences that it decodes together at most.
        active: Sequences that it decodes now.
        waiting: Requests that wait for a slot.
        memory_tokens: Tokens of texts that its drafter remembers.
        memory_bytes: Bytes that this memory takes.
        choices: What it has chosen to draft with, by batch size.
    """

    seconds: float
    device: str
    facts: EngineFacts
    slots: int
    active: int
    waiting: int
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()


LearnerState = Literal["starting", "measuring", "learning", "resting", "ended"]


@dataclass(frozen=True)
class LearningReport:
    """The state of a job's learner.

    Args:
        state: What it is doing: `measuring` while it stands aside for a moment, to see how fast engines are without it;
            `ended` if it had an error, or its process ended too often.
        reason: Why, in a line for people.
        version: Number of the newest version of the head; None before the first one.
        beta: β of what it has learnt by now, on held-out rows; None before it was measured.
        published_beta: β of the newest version on the same rows; None before it was measured.
        versions: Versions that were published, in all submissions.
        discarded: Versions that were given up because their loss was not finite.
        steps: Optimiser steps.
        seconds: For which it has worked.
        loss: Of the newest step, in nats; None before the first one.
        rows: Rows to learn from that it has.
        held_out: Rows to measure on that it has.
        nbytes: Bytes of both.
        dropped: Batches of rows that its process did not get to.
        taken_seconds: By which it has made the job longer.
        saved_seconds: By which what was learnt has made the job shorter.
    """

    state: LearnerState = "starting"
    reason: str = "it begins"
    version: int | None = None
    beta: float | None = None
    published_beta: float | None = None
    versions: int = 0
    discarded: int = 0
    steps: int = 0
    seconds: float = 0.0
    loss: float | None = None
    rows: int = 0
    held_out: int = 0
    nbytes: int = 0
    dropped: int = 0
    taken_seconds: float = 0.0
    saved_seconds: float = 0.0


@dataclass(frozen=True)
class Mail:
    """What the board was told since the driver last asked.

    Args:
        life: Name of the board's process; another one knows nothing of what this one was told.
        number: Number of the last report in it.
        parts: Reports by part.
        engines: Reports by engine.
        first: When the first engine reported, in seconds since 1970; None before.
        last: When a part was last reported, in seconds since 1970.
        stage: What an engine that starts was doing last; None before its process runs.
        failure: Why an engine could not load its models.
        crash: Why an engine's process ended last.
    """

    life: str
    number: int
    parts: Mapping[str, PartReport]
    engines: Mapping[str, EngineReport]
    first: float | None = None
    last: float | None = None
    stage: str | None = None
    failure: str | None = None
    crash: str | None = None
