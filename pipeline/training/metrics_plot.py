"""Picture of a run: loss and β over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from pipeline.training.metrics_log import Record

_SMOOTHING = 0.9


def plot_run(records: Sequence[Record], file: Path) -> None:
    """Draw the metrics of a run to a PNG file."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, beta_axes = figure.subplots(1, 2)
    steps = [record["step"] for record in records if "loss" in record]
    losses = [record["loss"] for record in records if "loss" in record]
    loss_axes.plot(steps, losses, linewidth=0.5, alpha=0.4)
    loss_axes.plot(steps, smoothed(losses), color="C0")
    loss_axes.set(xlabel="step", ylabel="loss (nats)", title="loss of a step, and its running mean")
    evaluated = [record for record in records if "beta" in record]
    for nodes in evaluated[0]["beta"] if evaluated else ():
        values = [record["beta"][nodes] for record in evaluated]
        beta_axes.plot([record["step"] for record in evaluated], values, marker="o", label=f"{nodes} nodes")
    if evaluated:
        beta_axes.legend()
    beta_axes.set(xlabel="step", ylabel="β", title="held-out β, simulated")
    figure.savefig(file, dpi=120, format="png")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean with exponential weights, without bias at the start."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(total / weight)
    return result
