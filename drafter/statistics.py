"""Raw speculation counts, and the only place where ratios are made of them.

Counts are stored per request because published acceptance figures differ by how the bonus token and the
prefill are counted; from raw counts every convention can be derived. Names follow vLLM's per-request statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    """

    name: str
    rate: float
    nodes: int
    drafted_rate: float


@dataclass(frozen=True)
class BatchChoice:
    """Which member drafts at a batch size, and why.

    Args:
        rows: The batch size for which latencies were measured.
        chosen: Name of the member.
        trials: Trials that have ended.
        members: What is believed of each.
    """

    rows: int
    chosen: str
    trials: int
    members: tuple[MemberView, ...]


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
        stage_seconds: Seconds in each stage of a step; see `drafter.stage_times`.
        memory_tokens: Tokens of texts that the drafter remembers.
        memory_bytes: Bytes that its memory of them takes.
        choices: Which of several drafters drafts, by batch size; empty where there is one.
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
