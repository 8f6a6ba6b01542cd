"""What the job has found: the ROC of the classifier and the curve of utility against speed, as JSON, text and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from drafter.evaluation.leniency.kept_utility import VerifierFigures, utility_plot, utility_table
from drafter.pivots.pivot_training import Roc


@dataclass(frozen=True)
class PivotResults:
    """What has been found.

    Args:
        labels: Labelled tokens.
        pivots: How many of them are pivots.
        held_out: How many of them the classifier has not learned from.
        roc: On those; None where they are all alike.
        curve: Exact decoding, and `pad` at rising σ, on the held-out prompts.
        where: Hardware, versions and command line.
    """

    labels: int
    pivots: int
    held_out: int
    roc: Roc | None
    curve: Sequence[VerifierFigures]
    where: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return all as plain values, for JSON."""
        return {
            "labels": self.labels,
            "pivots": self.pivots,
            "held_out": self.held_out,
            "roc": None if self.roc is None else asdict(self.roc),
            "curve": [one.as_dict() for one in self.curve],
            "environment": self.where,
        }

    def lines(self) -> list[str]:
        """Say it in lines."""
        area = "not known: they are all alike" if self.roc is None else f"{self.roc.area:.3f}"
        return [
            f"labels:   {self.labels:,} rejected tokens, {self.pivots:,} of them pivots",
            f"ROC:      area {area}, on {self.held_out:,} tokens of held-out prompts",
            "",
            utility_table(self.curve),
            "",
        ]

    def write_plots(self, folder: Path) -> list[Path]:
        """Draw the ROC and the curve as PNG files, and return these."""
        figures = {"utility_by_beta.png": utility_plot(self.curve)}
        if self.roc is not None:
            figures["roc.png"] = roc_plot(self.roc)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=150)
        return [folder / name for name in figures]


def roc_plot(found: Roc) -> Figure:
    """Plot pivots that are found over harmless tokens that are taken for pivots."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    panel = figure.subplots()
    wrong, right = [one.false_positives for one in found.points], [one.true_positives for one in found.points]
    panel.plot(wrong, right, color="#0072B2", label=f"area {found.area:.3f}")
    panel.plot([0, 1], [0, 1], color="grey", linestyle=":", label="by chance")
    panel.set(
        xlabel="share of harmless tokens rejected", ylabel="share of pivots rejected", xlim=(0, 1), ylim=(0, 1.02)
    )
    panel.legend(loc="lower right")
    return figure
