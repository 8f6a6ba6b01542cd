"""What an evaluation found: raw counts and seconds, and the JSON they are kept in. Tables and plots follow from it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafter.evaluation.plan import Arm
from drafter.statistics import DecodeCounts

RESULTS_FILE = "results.json"

Place = tuple[float, int, str]
"""Temperature, batch size and set of questions: what is measured side by side."""


@dataclass(frozen=True)
class StageSums:
    """Where the time of a decoder's steps went, in a pass of its own.

    Args:
        seconds: By stage, over all steps.
        tokens: New tokens of these steps.
    """

    seconds: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class Cell:
    """One arm on one set of questions, at one batch size and temperature.

    Args:
        questions: Name of the set.
        batch: Requests decoded together.
        temperature: Of the base's choices.
        arm: The way to decode.
        tokens: New tokens of each run, round by round; a run is one prompt at batch 1, otherwise all prompts.
        seconds: Of the same runs.
        differing_tokens: Tokens over all rounds that are not plain decoding's; None where the draws are not the same.
        counts: Raw speculation counts over all rounds, by category; empty where there are none.
        stages: Where the time went; None where it cannot be told.
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
    def place(self) -> Place:
        """What it shares with the cells that it is compared with."""
        return self.temperature, self.batch, self.questions


@dataclass(frozen=True)
class Skipped:
    """An arm that there is not: `drafter` has no such `tree`, for a `reason`."""

    drafter: str
    tree: str
    reason: str


@dataclass(frozen=True)
class Results:
    """An evaluation.

    Args:
        environment: Where and how it was measured.
        plan: The settings.
        questions: By set: file, number of questions and of prompts, fingerprint, categories.
        heads: Algorithm, configuration, parameters and provenance of each draft head.
        skipped: What could not be measured.
        cells: What was.
    """

    environment: dict[str, Any]
    plan: dict[str, Any]
    questions: dict[str, dict[str, Any]]
    heads: dict[str, dict[str, Any]]
    skipped: list[Skipped]
    cells: list[Cell] = field(default_factory=list)

    def same_measurement(self, other: Results) -> bool:
        """Whether cells of the other belong beside these: same plan, questions, models, machine and code."""
        return _setting(self) == _setting(other)

    def save(self, folder: Path) -> None:
        """Write `results.json` into `folder`, as a whole or not at all."""
        values = asdict(self)
        for cell in values["cells"]:
            for counts in cell["counts"].values():
                del counts["per_step_accepted"]  # empty in sums
        write_json(folder / RESULTS_FILE, values)

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Read what `save` wrote."""
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


def _setting(results: Results) -> str:
    names = ("hardware", "threads", "dtype", "base", "versions", "commit")
    where = {name: results.environment[name] for name in names}
    # As JSON, which knows no tuples.
    return json.dumps([results.plan, results.questions, results.heads, where], sort_keys=True)


def write_json(path: Path, values: Any) -> None:
    """Write JSON, lists of numbers on one line each, as a whole or not at all."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    text = re.sub(r'\[\n[^\[\]{}"]*\]', lambda found: " ".join(found[0].split()), text)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
