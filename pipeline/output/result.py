"""What a job came to and what it cost: rows and tokens by what became of them, speed, GPU hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.statistics import per_second
from pipeline.output.summary import ValidSums


@dataclass(frozen=True)
class Cost:
    unit: str  # `GPU-seconds`, or `CPU-seconds` where there is no GPU
    seconds: float  # in `unit`, for which engines held their share of the cluster, loading and repeated work included
    generating: float  # wall-clock seconds in which rows were generated
    generated: int  # new tokens in that time, those of repeated rows included
    tokens: int  # new tokens in the output
    devices: tuple[str, ...]

    @property
    def per_thousand(self) -> float:
        return 1000 * self.seconds / self.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a second; None where the generation time is unknown. See `per_second`."""
        return per_second(self.generated, self.generating) if self.generating else None


def cost_of(submissions: Sequence[Mapping[str, Any]], rows: int, tokens: int) -> Cost | str:
    """Return the cost of an output, or the reason why it is unknown; `rows` includes errors."""
    if not submissions:
        return "status.json, which says how long the engines ran, is missing"
    if tokens == 0:
        return "no token was generated"
    counted = sum(one["rows"] for one in submissions)
    if counted < rows:
        return f"status.json has only {counted:,} of the {rows:,} rows"
    gpu, cpu = (sum(one[unit] for one in submissions) for unit in ("gpu_seconds", "cpu_seconds"))
    if gpu + cpu == 0:
        return "status.json does not say how long the engines ran"
    devices = dict.fromkeys(one["device"] for one in submissions if one["device"])
    unit, seconds = ("GPU-seconds", gpu) if gpu else ("CPU-seconds", cpu)
    generating, generated = (sum(one[name] for one in submissions) for name in ("seconds", "tokens"))
    return Cost(unit, seconds, generating, generated, tokens, tuple(devices))


def times_as_fast(mine: Cost | str, theirs: Cost | str) -> float | None:
    """Return how many times as many new tokens a second an output has as another; None where one is unknown.

    Loading is left out, of which a short job has as much as a long one.
    """
    rates = [None if isinstance(one, str) else one.tokens_per_second for one in (mine, theirs)]
    return rates[0] / rates[1] if rates[0] is not None and rates[1] else None


def job_result(
    sums: ValidSums, failed: int, submissions: Sequence[Mapping[str, Any]], per_gpu_hour: float | None
) -> dict[str, Any]:
    """Return the entry `result` of `run.json`; what is not known is None.

    Rows and the tokens in them are those of the files, so that nothing counts twice, however often the job was
    submitted. Time and cost are of all submissions, with what they did again.

    Args:
        failed: Rows in `errors/`.
        submissions: Those of `status.json`.
    """
    tokens = sums.valid_tokens + sums.other_tokens
    cost = cost_of(submissions, sums.valid + sums.others + failed, tokens)
    known = not isinstance(cost, str)
    made = [one.get("engine_tokens") for one in submissions]
    lost = max(sum(made) - tokens, 0) if known and None not in made else None  # type: ignore[arg-type]
    seconds = None if isinstance(cost, str) else cost.generating
    gpu_hours = sum(one["gpu_seconds"] for one in submissions) / 3600 if known else None
    return {
        "rows": {"valid": sums.valid, "invalid": sums.others, "failed": failed},
        "tokens": {"valid": sums.valid_tokens, "invalid": sums.other_tokens, "failed": lost},
        "seconds": seconds,
        "valid_tokens_per_second": round(per_second(sums.valid_tokens, seconds), 1) if seconds else None,
        "gpu_hours": gpu_hours,
        "cpu_hours": sum(one["cpu_seconds"] for one in submissions) / 3600 if known else None,
        "cost": gpu_hours * per_gpu_hour if gpu_hours and per_gpu_hour is not None else None,
    }
