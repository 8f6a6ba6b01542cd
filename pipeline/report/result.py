"""The result of a job in numbers: rows and tokens by what became of them, speed, and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter.statistics import per_second
from pipeline.output.summary import ValidSums
from pipeline.report.outputs import cost_of


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
