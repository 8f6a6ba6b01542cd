"""What an output cost, from what its submissions noted in `status.json`; or why that is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What an output cost.

    Args:
        unit: `GPU-seconds`, or `CPU-seconds` where there is no GPU.
        seconds: How many of these: for that long engines held their share of the cluster. Loading and work that was
            done twice are included.
        generating: Seconds of wall-clock time in which rows were generated.
        tokens: New tokens in the output.
        devices: Names of the devices it ran on.
    """

    unit: str
    seconds: float
    generating: float
    tokens: int
    devices: tuple[str, ...]

    @property
    def per_thousand(self) -> float:
        """GPU-seconds (or CPU-seconds) per thousand new tokens."""
        return 1000 * self.seconds / self.tokens


def cost_of(submissions: Sequence[Mapping[str, Any]], rows: int, tokens: int) -> Cost | str:
    """Return the cost of an output, or why it is not known.

    Args:
        submissions: As in `status.json`.
        rows: Rows of the output, errors included.
        tokens: New tokens of the output.
    """
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
    return Cost(unit, seconds, sum(one["seconds"] for one in submissions), tokens, tuple(devices))
