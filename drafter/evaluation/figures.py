"""Figures derived from an evaluation's raw counts and seconds: β, γ and acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from drafter.evaluation.plan import PLAIN, TRANSFORMERS
from drafter.evaluation.results import Cell
from drafter.statistics import acceptance_by_depth, mean_acceptance_length, mean_rate, speedup, total


@dataclass(frozen=True)
class Figures:
    """The figures of one cell.

    Args:
        cell: The cell.
        rate: Tokens per second, median over rounds.
        gamma: Speed relative to plain decoding.
        relative_to_transformers: Speed relative to `transformers.generate`; None if that was not measured.
        beta: New tokens per base decode forward; None for transformers.
        by_depth: Share of steps that accepted at least 1, 2, … draft tokens.
    """

    cell: Cell
    rate: float
    gamma: float
    relative_to_transformers: float | None
    beta: float | None
    by_depth: list[float]


def figures(cells: Sequence[Cell]) -> list[Figures]:
    """Return the figures of all cells. Every setting must have a cell of plain decoding."""
    rates = {
        (cell.setting, cell.arm): [mean_rate(*one) for one in zip(cell.tokens, cell.seconds, strict=True)]
        for cell in cells
    }
    found = []
    for cell in cells:
        ours, counts = rates[cell.setting, cell.arm], total(cell.counts.values())
        theirs = rates.get((cell.setting, TRANSFORMERS))
        found.append(
            Figures(
                cell,
                rate=median(ours),
                gamma=speedup(ours, rates[cell.setting, PLAIN]),
                relative_to_transformers=None if theirs is None else speedup(ours, theirs),
                beta=mean_acceptance_length(counts) if cell.counts else None,
                by_depth=acceptance_by_depth(counts),
            )
        )
    return found
