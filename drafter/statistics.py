"""Raw speculation counts, and the only place where ratios are made of them.

Counts are stored per request because published acceptance figures differ by how the bonus token and the
prefill are counted; from raw counts every convention can be derived. Names follow vLLM's per-request statistics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from math import sqrt
from statistics import mean, median
from typing import Any


@dataclass
class DecodeCounts:
    """What happened to one request (or, summed, to many).

    Args:
        num_output_tokens: New tokens, bonus tokens included.
        num_decode_steps: Base decode forwards the request took part in. The prefill is none, unless it makes the
            first token, which then comes of a plain step.
        num_spec_steps: Those of them that verified at least one draft token.
        num_draft_tokens: Draft tokens verified (tree nodes without the root).
        num_accepted_draft_tokens: Draft tokens that became output.
        acceptance_histogram: `acceptance_histogram[k]` decode steps emitted `k` accepted draft tokens.
        per_step_accepted: Accepted draft tokens of each decode step, in order; empty in sums.
    """

    num_output_tokens: int = 0
    num_decode_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)

    def record_step(self, *, emitted: int, accepted: int, drafted: int) -> None:
        """Count a decode step: `drafted` nodes verified, `emitted` tokens of which `accepted` were drafted."""
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
    """What is believed of a member at a batch size.

    Args:
        name: Of the member.
        rate: Tokens per second and row at its best number of nodes, plain decoding included.
        nodes: That number; 0 where plain decoding is faster.
        drafted_rate: Tokens per second and row where it drafts, though plain decoding be faster.
        beside: The member, or plain decoding, that it was last compared with, and which was chosen; None where it has
            not been compared.
        relative: Its tokens per second ÷ those of `beside`, as both were estimated then. Never above the margin by
            which another must be better to be chosen.
    """

    name: str
    rate: float
    nodes: int
    drafted_rate: float
    beside: str | None = None
    relative: float = 0.0


PLAIN = "plain decoding"
"""As `MemberView.beside`."""


@dataclass(frozen=True)
class Verdict:
    """Whether drafting pays, as it was last decided, and what that rested on.

    Args:
        nodes: Draft tokens a row of the tree that is worth most.
        cost: By how much each of these makes a step longer, in plain steps.
        gain: Tokens that each of these is expected to bring.
    """

    nodes: int
    cost: float
    gain: float

    @property
    def drafts(self) -> bool:
        """Whether it pays: a step then gives more tokens in the time than plain steps do."""
        return self.gain > self.cost


@dataclass
class StepSums:
    """Decode steps, beside what plain decoding is estimated to take for the same tokens.

    The estimate of each step is the latency of a plain step times the tokens that a row got. That latency is measured
    at start, and corrected by every plain step since. A plain step is its own estimate.

    Args:
        steps: How many.
        timed: Those of them whose time is known. That of the others is estimated, too, as it is on a GPU.
        plain: Those of them for which nothing was drafted.
        row_steps: The same as `steps`, counted once for each row that took part.
        spec_row_steps: Those of them that verified at least one draft token.
        seconds: Their time.
        plain_seconds: That of plain decoding.
        squared: Sum of squares of the seconds of each step.
        plain_squared: The same of plain decoding.
        product: Sum of products of the two.
    """

    steps: int = 0
    timed: int = 0
    plain: int = 0
    row_steps: int = 0
    spec_row_steps: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    squared: float = 0.0
    plain_squared: float = 0.0
    product: float = 0.0

    def add(
        self, rows: int, speculated: int, seconds: float, plain_seconds: float, *, timed: bool, plain: bool
    ) -> None:
        """Count a step of so many rows, of which `speculated` verified draft tokens."""
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

    def plus(self, other: StepSums) -> StepSums:
        """The sums over both."""
        return StepSums(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def speedup(self) -> float:
        """γ as estimated: tokens per second relative to plain decoding, prefills left out; 0.0 without steps."""
        return self.plain_seconds / self.seconds if self.seconds else 0.0

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % confidence interval of `speedup`, a ratio of sums over steps, by the delta method.

        It tells how much steps differ, not how far the latency of a plain step may be off. None for too few steps.
        """
        if self.timed < 2 or not self.seconds:
            return None
        ratio = self.speedup
        squares = max(self.plain_squared - 2 * ratio * self.product + ratio * ratio * self.squared, 0.0)
        return 1.96 * sqrt(squares * self.steps / (self.steps - 1)) / self.seconds

    @property
    def speculated_share(self) -> float:
        """Share of `row_steps` that verified at least one draft token."""
        return self.spec_row_steps / self.row_steps if self.row_steps else 0.0


@dataclass(frozen=True)
class BatchChoice:
    """What a budget has chosen at a batch size, and why.

    Args:
        rows: The batch size for which latencies were measured. Steps of about so many rows are counted here.
        chosen: Name of the member that drafts; empty where the drafter is one.
        trials: Trials that have ended.
        members: What is believed of each, the chosen one among them; none before there is a choice between several.
        verdict: Whether drafting with the chosen one pays; None before that was decided.
        sums: The steps.
    """

    rows: int
    chosen: str
    trials: int
    members: tuple[MemberView, ...]
    verdict: Verdict | None = None
    sums: StepSums = field(default_factory=StepSums)


def merged_choices(engines: Iterable[Sequence[BatchChoice]]) -> tuple[BatchChoice, ...]:
    """What several engines have chosen, by batch size: sums over all, and the choice of the one with most steps."""
    by_rows: dict[int, list[BatchChoice]] = {}
    for choice in (one for choices in engines for one in choices):
        by_rows.setdefault(choice.rows, []).append(choice)
    return tuple(
        replace(
            max(some, key=lambda one: one.sums.steps),
            sums=reduce(StepSums.plus, (one.sums for one in some)),
        )
        for _, some in sorted(by_rows.items())
    )


@dataclass(frozen=True)
class EngineState:
    """What an engine is doing, and sums of what it has done.

    Args:
        active: Requests in slots, being prefilled or decoded.
        waiting: Requests that wait for one.
        slots: Requests that may be in slots together: the configuration's, or fewer for a while after memory ran out.
        steps: Decode steps done.
        row_steps: The same, counted once for each request that took part.
        output_tokens: New tokens handed out.
        draft_tokens: Draft tokens verified.
        accepted_tokens: Draft tokens that became output.
        prefilled_tokens: Tokens of prompts that the base has read.
        shared_tokens: Tokens of prompts that it had read for another request already.
        preemptions: Requests that gave up their slot because memory ran out, to be taken up again later.
        stage_seconds: Seconds in each stage of a step; see `drafter.statistics`.
        memory_tokens: Tokens of texts that the drafter remembers.
        memory_bytes: Bytes that its memory of them takes.
        choices: What the budget has chosen, by batch size, and why; empty where it is fixed.
        drafter_version: Number of the newest weights that the drafter has taken; None where they never change.
    """

    active: int
    waiting: int
    slots: int
    steps: int
    row_steps: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    prefilled_tokens: int
    shared_tokens: int
    preemptions: int
    stage_seconds: dict[str, float]
    memory_tokens: int = 0
    memory_bytes: int = 0
    choices: tuple[BatchChoice, ...] = ()
    drafter_version: int | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in steps."""
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
        histogram = result.acceptance_histogram
        histogram.extend([0] * (len(one.acceptance_histogram) - len(histogram)))
        for accepted, steps in enumerate(one.acceptance_histogram):
            histogram[accepted] += steps
    return result


def mean_acceptance_length(counts: DecodeCounts) -> float:
    """β: new tokens per base decode forward (1.0 for plain decoding; bonus token in, prefill out; 0.0 if none)."""
    return counts.num_output_tokens / counts.num_decode_steps if counts.num_decode_steps else 0.0


def draft_acceptance_rate(counts: DecodeCounts) -> float:
    """Accepted ÷ verified draft tokens (0.0 if none was drafted)."""
    return counts.num_accepted_draft_tokens / counts.num_draft_tokens if counts.num_draft_tokens else 0.0


def acceptance_by_depth(counts: DecodeCounts) -> list[float]:
    """Share of decode steps that accepted at least `d` draft tokens, for `d` = 1, 2, …"""
    histogram = counts.acceptance_histogram
    steps = sum(histogram)
    return [sum(histogram[depth:]) / steps for depth in range(1, len(histogram))] if steps else []


def speculated_share(counts: DecodeCounts) -> float:
    """Share of decode steps that verified at least one draft token (0.0 if there were no steps)."""
    return counts.num_spec_steps / counts.num_decode_steps if counts.num_decode_steps else 0.0


def per_second(number: float, seconds: float) -> float:
    """New tokens (or rows) ÷ seconds of generation; loading and timing the models are not part of these. 0.0 in none.

    Every rate of generation that the project shows is this one.
    """
    return number / seconds if seconds > 0 else 0.0


def mean_rate(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """Mean over runs of tokens per second; a run is one prompt, or at larger batches all of them."""
    return mean(per_second(made, taken) for made, taken in zip(tokens, seconds, strict=True))


def speedup(rates: Sequence[float], reference: Sequence[float]) -> float:
    """γ, where `reference` is plain decoding: median over rounds of the ratio of two rates of the same round."""
    return median(ours / theirs for ours, theirs in zip(rates, reference, strict=True))


def statistics_columns(counts: DecodeCounts) -> dict[str, Any]:
    """The per-request statistics as flat columns, raw counts first and the derived ratios after."""
    return {
        "num_decode_steps": counts.num_decode_steps,
        "num_spec_steps": counts.num_spec_steps,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        "acceptance_histogram": list(counts.acceptance_histogram),
        "per_step_accepted": list(counts.per_step_accepted),
        "mean_acceptance_length": mean_acceptance_length(counts),
        "draft_acceptance_rate": draft_acceptance_rate(counts),
    }


@dataclass(frozen=True)
class PairedDifference:
    """Two measurements of the same things.

    Args:
        first: Mean of the first.
        second: Mean of the second.
        mean: Mean of second minus first.
        margin: Half the width of its 95 % confidence interval, by the normal approximation; None for fewer than two.
    """

    first: float
    second: float
    mean: float
    margin: float | None


def kept_share(difference: PairedDifference) -> float | None:
    """Share of the first's mean that the second has; None where the first's is not above 0."""
    return difference.second / difference.first if difference.first > 0 else None


@dataclass
class PairedSums:
    """Sums over pairs, from which a paired difference follows without keeping the pairs."""

    pairs: int = 0
    first: float = 0.0
    second: float = 0.0
    squares: float = 0.0

    def add(self, first: float, second: float) -> None:
        """Count a pair."""
        self.pairs += 1
        self.first += first
        self.second += second
        self.squares += (second - first) ** 2

    @property
    def difference(self) -> PairedDifference:
        """The difference of at least one pair."""
        number, total = self.pairs, self.second - self.first
        margin = None
        if number > 1:
            variance = max(self.squares - total * total / number, 0.0) / (number - 1)
            margin = 1.96 * sqrt(variance / number)
        return PairedDifference(self.first / number, self.second / number, total / number, margin)


# ---- Where the engine's time goes, as running sums that cost nothing to keep.

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
