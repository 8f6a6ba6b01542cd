"""What an output cost, from what its submissions noted in `status.json`; or why that is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.statistics import per_second


@dataclass(frozen=True)
class Cost:
    """What an output cost.

    Args:
        unit: `GPU-seconds`, or `CPU-seconds` where there is no GPU.
        seconds: How many of these: for that long engines held their share of the cluster. Loading and work that was
            done twice are included.
        generating: Seconds of wall-clock time in which rows were generated.
        generated: New tokens that were generated in these, those of rows that were done twice included.
        tokens: New tokens in the output.
        devices: Names of the devices it ran on.
    """

    unit: str
    seconds: float
    generating: float
    generated: int
    tokens: int
    devices: tuple[str, ...]

    @property
    def per_thousand(self) -> float:
        """GPU-seconds (or CPU-seconds) per thousand new tokens."""
        return 1000 * self.seconds / self.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a second; None where it is not known for how long rows were generated. See `per_second`."""
        return per_second(self.generated, self.generating) if self.generating else None


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
    generating, generated = (sum(one[name] for one in submissions) for name in ("seconds", "tokens"))
    return Cost(unit, seconds, generating, generated, tokens, tuple(devices))
