"""Raw counts of speculative decoding, and all ratios made of them. Names follow vLLM's per-request statistics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import sqrt
from statistics import median
from typing import Any, Self

_TELLING_STEPS = 200  # steps that drafted, of which so few accepted tokens are no chance
_HARDLY_ABOVE_PLAIN = 1.1  # tokens of such a step


class Sums:
    """A dataclass of numbers, which are added one by one."""

    def plus(self, other: Self, sign: int = 1) -> Self:
        return type(self)(**{name: value + sign * getattr(other, name) for name, value in vars(self).items()})


@dataclass
class DecodeCounts:
    """Counts of one request, or summed over many, from which every published convention of acceptance can be derived.

    The prefill is a decode step only if it makes the first token, as a plain step.
    """

    num_output_tokens: int = 0  # new tokens, bonus tokens included
    num_decode_steps: int = 0  # target-model decode forwards the request took part in
    num_spec_steps: int = 0  # those of them that verified at least one draft token
    num_draft_tokens: int = 0  # draft tokens verified; tree roots are not counted
    num_accepted_draft_tokens: int = 0  # draft tokens that became output
    acceptance_histogram: list[int] = field(default_factory=list)  # [k]: steps that emitted k accepted draft tokens
    per_step_accepted: list[int] = field(default_factory=list)  # of each decode step, in order; empty in sums
    num_forced_tokens: int = 0  # new tokens about which `structured_outputs` left no choice, whoever drafted them

    def record_step(self, *, emitted: int, accepted: int, drafted: int) -> None:
        """Count a decode step: `drafted` draft tokens verified, `accepted` of them among the `emitted` tokens."""
        self.num_output_tokens += emitted
        self.num_decode_steps += 1
        self.num_spec_steps += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.acceptance_histogram.extend([0] * (accepted + 1 - len(self.acceptance_histogram)))
        self.acceptance_histogram[accepted] += 1
        self.per_step_accepted.append(accepted)


@dataclass(frozen=True)
class MemberView:
    """How fast one member of a drafter is at a batch size."""

    name: str
    beside: str | None = None  # the chosen member, or `PLAIN`; None for the chosen one itself
    relative: float = 0.0  # its tokens per second, as estimated, ÷ those of `beside`


PLAIN = "plain decoding"


@dataclass(frozen=True)
class Verdict:
    """Last decision on whether drafting pays.

    Each of the `nodes` draft tokens of a row's best tree adds `cost` plain steps of time, and `gain` expected tokens.
    """

    nodes: int
    cost: float
    gain: float

    @property
    def drafts(self) -> bool:
        """True if a step gives more tokens per second than plain steps do."""
        return self.gain > self.cost


@dataclass
class StepSums(Sums):
    """Sums over decode steps, with an estimate of plain decoding's time for the same tokens.

    The estimate of a step is the latency of a plain step × tokens per row. That latency is measured at start and
    corrected by every plain step since. A plain step is its own estimate.
    """

    steps: int = 0
    timed: int = 0  # steps whose time is known; that of the others is estimated, too
    plain: int = 0  # steps without draft tokens
    row_steps: int = 0  # steps, counted once for each row that took part
    spec_row_steps: int = 0  # row steps that verified at least one draft token
    seconds: float = 0.0
    plain_seconds: float = 0.0
    squared: float = 0.0  # sum of each step's `seconds`²
    plain_squared: float = 0.0  # of `plain_seconds`²
    product: float = 0.0  # of `seconds` × `plain_seconds`

    def add(
        self, rows: int, speculated: int, seconds: float, plain_seconds: float, *, timed: bool, plain: bool
    ) -> None:
        """Count a step of `rows` rows, of which `speculated` verified draft tokens."""
        self.steps += 1
        self.timed += timed
        self.plain += plain
        self.row_steps += rows
        self.spec_row_steps += speculated
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self.squared += seconds * seconds
        self.plain_squared += plain_seconds * plain_seconds
        self.product += seconds * plain_seconds

    @property
    def speedup(self) -> float:
        """γ, estimated: tokens per second ÷ those of plain decoding, without prefills; 0.0 without steps."""
        return _ratio(self.plain_seconds, self.seconds)

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % confidence interval of `speedup`, a ratio of sums over steps, by the delta method.

        Covers the spread of steps, not the error of the plain step's latency. None for too few steps.
        """
        if self.timed < 2 or not self.seconds:
            return None
        ratio = self.speedup
        squares = max(self.plain_squared - 2 * ratio * self.product + ratio * ratio * self.squared, 0.0)
        return 1.96 * sqrt(squares * self.steps / (self.steps - 1)) / self.seconds

    @property
    def speculated_share(self) -> float:
        return _ratio(self.spec_row_steps, self.row_steps)


@dataclass(frozen=True)
class BatchChoice:
    """A budget's choice for steps of about `rows` rows, a batch size for which latencies were measured."""

    rows: int
    chosen: str  # name of the member that drafts; empty for a single drafter
    explored: int  # steps that explored what a member is worth
    members: tuple[MemberView, ...]  # empty before there was a choice between several
    verdict: Verdict | None = None  # on whether drafting with the chosen one pays; None before a decision
    sums: StepSums = field(default_factory=StepSums)


def merged_choices(engines: Iterable[Sequence[BatchChoice]]) -> tuple[BatchChoice, ...]:
    """Merge several engines' choices by batch size: sums over all, and the choice of the engine with most steps."""
    by_rows: dict[int, list[BatchChoice]] = {}
    for choice in (one for choices in engines for one in choices):
        by_rows.setdefault(choice.rows, []).append(choice)
    return tuple(
        replace(max(some, key=lambda one: one.sums.steps), sums=reduce(StepSums.plus, (one.sums for one in some)))
        for _, some in sorted(by_rows.items())
    )


@dataclass(frozen=True)
class EngineState:
    """Load of an engine, and running totals."""

    active: int  # requests in slots, being prefilled or decoded
    waiting: int
    slots: int  # usable slots: the configuration's, or fewer for a while after memory ran out
    steps: int
    row_steps: int  # steps, counted once for each request that took part
    output_tokens: int
    draft_tokens: int  # verified ones
    accepted_tokens: int
    prefilled_tokens: int  # prompt tokens that the target model has read
    shared_tokens: int  # prompt tokens whose KV was copied from another request
    preemptions: int  # requests that lost their slot because memory ran out, to be resumed later
    stage_seconds: dict[str, float]  # in each of `STAGES`
    memory_tokens: int = 0  # tokens of texts that the drafter remembers
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()  # the budget's; empty for a fixed one
    drafter_version: int | None = None  # number of the drafter's newest weights; None where they never change

    @property
    def busy_seconds(self) -> float:
        return sum(self.stage_seconds.values())


def total(counts: Iterable[DecodeCounts]) -> DecodeCounts:
    """Sum counts over requests; `per_step_accepted` is dropped."""
    result = DecodeCounts()
    for one in counts:
        result.num_output_tokens += one.num_output_tokens
        result.num_decode_steps += one.num_decode_steps
        result.num_spec_steps += one.num_spec_steps
        result.num_draft_tokens += one.num_draft_tokens
        result.num_accepted_draft_tokens += one.num_accepted_draft_tokens
        result.num_forced_tokens += one.num_forced_tokens
        histogram = result.acceptance_histogram
        histogram.extend([0] * (len(one.acceptance_histogram) - len(histogram)))
        for accepted, steps in enumerate(one.acceptance_histogram):
            histogram[accepted] += steps
    return result


@dataclass(frozen=True)
class RecordSums(Sums):
    """Sums over requests with `structured_outputs`."""

    records: int = 0
    valid: int = 0  # those whose output is whole
    tokens: int = 0  # new tokens
    forced: int = 0  # those of them about which there was no choice

    @property
    def valid_share(self) -> float:
        return _ratio(self.valid, self.records)

    @property
    def forced_share(self) -> float:
        return _ratio(self.forced, self.tokens)


def mean_acceptance_length(counts: DecodeCounts) -> float:
    """β: new tokens per target-model decode forward; bonus token in, prefill out; 0.0 without steps."""
    return _ratio(counts.num_output_tokens, counts.num_decode_steps)


def draft_acceptance_rate(counts: DecodeCounts) -> float:
    """Accepted ÷ verified draft tokens; 0.0 if none was drafted."""
    return _ratio(counts.num_accepted_draft_tokens, counts.num_draft_tokens)


def acceptance_by_depth(counts: DecodeCounts) -> list[float]:
    """Return the share of decode steps that accepted at least `d` draft tokens, for `d` = 1, 2, …"""
    histogram = counts.acceptance_histogram
    steps = sum(histogram)
    return [sum(histogram[depth:]) / steps for depth in range(1, len(histogram))] if steps else []


def rejection_warning(counts: DecodeCounts) -> str | None:
    """Return a sentence about a drafter of which hardly a draft token is accepted; None where that is not so.

    Such a head is mostly another target model's. Steps that did not draft say nothing.
    """
    steps, accepted = counts.num_spec_steps, counts.num_accepted_draft_tokens
    if steps < _TELLING_STEPS or 1 + accepted / steps >= _HARDLY_ABOVE_PLAIN:
        return None
    return (
        f"WARNING: only {accepted:,} of {counts.num_draft_tokens:,} draft tokens were accepted in {steps:,} steps that "
        "drafted: is the drafter made for this target model?"
    )


def speculated_share(counts: DecodeCounts) -> float:
    """Share of decode steps that verified at least one draft token; 0.0 without steps."""
    return _ratio(counts.num_spec_steps, counts.num_decode_steps)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def per_second(number: float, seconds: float) -> float:
    """Divide new tokens (or rows) by seconds of generation, without loading and warm-up; 0.0 in no time."""
    return number / seconds if seconds > 0 else 0.0


def speedup(rates: Sequence[float], reference: Sequence[float]) -> float:
    """γ: median over rounds of the ratio of two rates of the same round. `reference` is plain decoding."""
    return median(ours / theirs for ours, theirs in zip(rates, reference, strict=True))


def statistics_columns(counts: DecodeCounts) -> dict[str, Any]:
    """Return a request's statistics as flat columns: raw counts, then derived ratios."""
    return {
        **{name: value for name, value in vars(counts).items() if name != "num_output_tokens"},
        "mean_acceptance_length": mean_acceptance_length(counts),
        "draft_acceptance_rate": draft_acceptance_rate(counts),
    }


STAGES = ("prefill", "draft", "tree", "verify", "commit", "wait", "host")
"""Stages of a step.

`prefill` reads prompts; `draft` runs the drafter's network; `tree` searches the tree in its output; `verify` is the
target model's forward and the verifier's decision; `commit` moves accepted tokens' KV; `wait` waits for the device;
`host` is all work of the host alone.
"""


class StageTimes:
    """Seconds of the host's clock in each stage.

    A GPU runs asynchronously: there `draft` is the drafter's work on the host, `verify` the time to queue a whole step,
    and `wait` the rest of the step before, after that.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin a step: the time since the last mark counts for no stage."""
        self._since = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Add the time since the last mark to `stage`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now
