"""What an output has cost, from what its submissions noted in `status.json`; or why that is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What an output took.

    Args:
        unit: `GPU-seconds`, or `CPU-seconds` where there is no GPU.
        seconds: Of that unit: engines held their share of the cluster for so long, loading and repeated work included.
        generating: Seconds on the clock in which rows were generated.
        tokens: New tokens in the output.
        devices: What it ran on.
    """

    unit: str
    seconds: float
    generating: float
    tokens: int
    devices: tuple[str, ...]

    @property
    def per_thousand(self) -> float:
        """Seconds for a thousand new tokens."""
        return 1000 * self.seconds / self.tokens


def cost_of(submissions: Sequence[Mapping[str, Any]], rows: int, tokens: int) -> Cost | str:
    """The cost of an output with so many rows (errors included) and new tokens, or why it is not known."""
    if not submissions:
        return "status.json, which tells how long the engines ran, is missing"
    if tokens == 0:
        return "no token was generated"
    told = sum(one["rows"] for one in submissions)
    if told < rows:
        return f"status.json tells of {told:,} of the {rows:,} rows only"
    gpu, cpu = (sum(one[unit] for one in submissions) for unit in ("gpu_seconds", "cpu_seconds"))
    if gpu + cpu == 0:
        return "the engines' time was not noted"
    devices = dict.fromkeys(one["device"] for one in submissions if one["device"])
    unit, seconds = ("GPU-seconds", gpu) if gpu else ("CPU-seconds", cpu)
    return Cost(unit, seconds, sum(one["seconds"] for one in submissions), tokens, tuple(devices))
