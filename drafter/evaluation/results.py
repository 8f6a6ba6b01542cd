"""Results of an evaluation as JSON: raw counts and seconds, from which tables and plots are derived."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from drafter.evaluation.environment import comparable
from drafter.evaluation.plan import PLAIN, TRANSFORMERS, Arm
from drafter.statistics import DecodeCounts, acceptance_by_depth, mean_acceptance_length, mean_rate, speedup, total

RESULTS_FILE = "results.json"

Setting = tuple[float, int, str]
"""Temperature, batch size and set of questions. All arms are compared at each setting."""


@dataclass(frozen=True)
class StageSums:
    """Seconds by stage over all steps of a separate pass, and the number of their new tokens."""

    seconds: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class Cell:
    """One arm on one set of questions, at one batch size and temperature.

    Args:
        questions: Name of the set.
        batch: Requests decoded together.
        tokens: New tokens of each run, by round. A run is one prompt at batch 1, otherwise all prompts.
        seconds: Seconds of the same runs.
        differing_tokens: Tokens over all rounds that differ from plain decoding's; None if the arm does not draw the
            same random numbers.
        counts: Raw speculation counts over all rounds, by category; empty if the decoder keeps none.
        stages: Time by stage; None if the decoder does not measure it.
    """

    questions: str
    batch: int
    temperature: float
    arm: Arm
    tokens: list[list[int]]
    seconds: list[list[float]]
    differing_tokens: int | None
    counts: dict[str, DecodeCounts] = field(default_factory=dict)
    stages: StageSums | None = None

    @property
    def setting(self) -> Setting:
        """Setting, which the cells to compare share."""
        return self.temperature, self.batch, self.questions


@dataclass(frozen=True)
class Skipped:
    """A combination that cannot be measured: `drafter` has no such `tree`, for a `reason`."""

    drafter: str
    tree: str
    reason: str


@dataclass(frozen=True)
class Results:
    """An evaluation.

    Args:
        environment: Hardware, versions and command line.
        questions: For each set: file, number of questions and of prompts, fingerprint, categories.
        heads: For each draft head: algorithm, configuration, number of parameters, provenance.
        skipped: Combinations that cannot be measured.
    """

    environment: dict[str, Any]
    plan: dict[str, Any]
    questions: dict[str, dict[str, Any]]
    heads: dict[str, dict[str, Any]]
    skipped: list[Skipped]
    cells: list[Cell] = field(default_factory=list)

    def same_measurement(self, other: Results) -> bool:
        """Return whether cells of both can be compared: same plan, questions, models, machine and code."""
        return _identity(self) == _identity(other)

    def save(self, folder: Path) -> None:
        """Write `results.json` to `folder` atomically, creating the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        for cell in values["cells"]:
            for counts in cell["counts"].values():
                del counts["per_step_accepted"]  # It is empty in sums.
        write_json(folder / RESULTS_FILE, values)

    @classmethod
    def load(cls, folder: Path) -> Results:
        values = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        cells = [
            Cell(
                **cell
                | {
                    "arm": Arm(**cell["arm"]),
                    "counts": {category: DecodeCounts(**counts) for category, counts in cell["counts"].items()},
                    "stages": StageSums(**cell["stages"]) if cell["stages"] else None,
                }
            )
            for cell in values["cells"]
        ]
        return cls(**values | {"skipped": [Skipped(**one) for one in values["skipped"]], "cells": cells})


def _identity(results: Results) -> str:
    """Return the values that must agree for results to be comparable, as text."""
    values = [results.plan, results.questions, results.heads, comparable(results.environment)]
    return json.dumps(values, sort_keys=True)  # as JSON, because loaded results have lists instead of tuples


def write_json(path: Path, values: Any) -> None:
    """Write JSON atomically, each list of numbers on one line."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    text = re.sub(r'\[\n[^\[\]{}"]*\]', lambda found: " ".join(found[0].split()), text)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass(frozen=True)
class Figures:
    """Derived figures of one cell.

    Args:
        rate: Tokens per second, median over rounds.
        gamma: Speed relative to plain decoding.
        relative_to_transformers: Speed relative to `transformers.generate`; None if not measured.
        beta: New tokens per target decode forward; None for transformers.
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
