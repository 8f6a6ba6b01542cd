"""Plan and results of an evaluation: raw counts and seconds as JSON, and the figures derived from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from drafter.evaluation.intervals import Interval, bootstrap
from drafter.heads.config import Tree, write_whole
from drafter.json_fields import from_json
from drafter.statistics import DecodeCounts, mean_acceptance_length, per_second, speedup, total

RESULTS_FILE = "results.json"

STAGES = ("draft", "tree", "verify", "commit", "host")
"""Stages of a step in results; `wait` of `statistics.STAGES` counts as `verify`, `prefill` is left out."""

Nodes = int | Literal["auto"]

Setting = tuple[float, int, str]
"""Temperature, batch size and set of questions. All arms are compared at each setting."""


@dataclass(frozen=True)
class Arm:
    """One way to decode: a drafter as `load_drafter` takes it, its draft tree and number of draft tokens.

    The latter are None for plain decoding, the drafter `none`. `acceptance` is the β that was forced; see
    `ForcedAcceptance`.
    """

    drafter: str
    tree: Tree | None = None
    nodes: Nodes | None = None
    acceptance: float | None = None

    @property
    def method(self) -> str:
        """Name of the drafter for tables and plots, without folders.

        A training job has its head in a folder `head`, so the name is that of the job's output.
        """
        if self.tree is None:
            return "plain decoding" if self.drafter == "none" else self.drafter
        name = re.sub(r"[^:>+]*/", "", re.sub(r"(?<=[^:>+/])/head(?=/*(?:[>+]|$))", "", self.drafter).rstrip("/"))
        return name if self.acceptance is None else f"{name}, FORCED to β {self.acceptance:g}"


PLAIN = Arm("none")


@dataclass(frozen=True)
class Plan:
    """Every drafter with every tree and number of draft tokens, at every batch size and temperature.

    Args:
        drafters: Names as `load_drafter` takes them. A drafter without one of the `trees` is skipped there.
        samples: Answers to each question, each with its own seed, one after another.
        compile: Whether this project's engines compile the target model's forward.
        acceptance: β that is forced upon the drafters, instead of what they are worth; see `ForcedAcceptance`.

    Raises:
        ValueError: A list is empty or has a value twice, or a value is out of range.
    """

    drafters: tuple[str, ...]
    trees: tuple[Tree, ...] = ("exact", "static")
    num_draft_tokens: tuple[Nodes, ...] = (16, "auto")
    batches: tuple[int, ...] = (1, 4)
    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    rounds: int = 1
    max_new_tokens: int = 48
    compile: bool = False
    acceptance: float | None = None

    def __post_init__(self) -> None:
        if self.acceptance is not None and not 1 <= self.acceptance < math.inf:
            raise ValueError(f"acceptance must be forced to at least 1 token a step, not {self.acceptance:g}")
        called = dict[str, str]()
        for drafter in self.drafters:
            name = Arm(drafter, "exact").method
            if (other := called.setdefault(name, drafter)) != drafter:
                both = f"{other} and {drafter} would both be called {name}"
                raise ValueError(f"drafters: {both} in the tables: copy one to a folder of another name")
        for name in ("drafters", "trees", "num_draft_tokens", "batches", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one value, none of them twice, not {list(values)}")
        for name in ("num_draft_tokens", "batches", "samples", "rounds", "max_new_tokens"):
            values = getattr(self, name)
            for number in values if isinstance(values, tuple) else (values,):
                if number != "auto" and number < 1:
                    raise ValueError(f"{name} must be at least 1, not {number}")
        if not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise ValueError(f"temperatures must be finite and at least 0, not {list(self.temperatures)}")
        if self.samples > 1 and 0 in self.temperatures:
            raise ValueError(
                "samples: at temperature 0 all answers to a question are the same: use one, or other temperatures"
            )
        if unknown := [tree for tree in self.trees if tree not in get_args(Tree)]:
            raise ValueError(f"trees must be {' or '.join(get_args(Tree))}, not {unknown[0]}")
        if PLAIN.drafter in self.drafters:
            raise ValueError(f"drafters: {PLAIN.drafter} is no drafter: leave it out")


@dataclass(frozen=True)
class StageSums:
    """Seconds by stage over all steps, and the number of their new tokens."""

    seconds: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class Cell:
    """Record of one arm on one set of questions, at one batch size and temperature.

    A run is one prompt at batch 1, otherwise all prompts.
    """

    questions: str
    batch: int
    temperature: float
    arm: Arm
    tokens: list[list[int]]  # new tokens of each run, by round
    seconds: list[list[float]]  # of the same runs
    differing_tokens: int | None  # from plain decoding's, over all rounds; None of older results that drew otherwise
    counts: dict[str, DecodeCounts] = field(default_factory=dict)  # sums over all rounds, by category
    stages: StageSums | None = None
    tokens_by_prompt: list[int] = field(default_factory=list)  # new tokens of each prompt, summed over all rounds
    steps_by_prompt: list[int] = field(default_factory=list)  # decode steps of the same prompts
    question_by_prompt: list[int] = field(default_factory=list)  # number of their question; older results have none

    @property
    def rates(self) -> list[list[float]]:
        """Tokens per second of each run, by round."""
        rounds = zip(self.tokens, self.seconds, strict=True)
        return [[per_second(*run) for run in zip(made, taken, strict=True)] for made, taken in rounds]

    @property
    def questions_asked(self) -> Sequence[int]:
        """The number of each prompt's question, `[P]`; where that is not known, each is one of its own."""
        return self.question_by_prompt or range(len(self.tokens[0] if self.batch == 1 else self.steps_by_prompt))

    @property
    def setting(self) -> Setting:
        return self.temperature, self.batch, self.questions


@dataclass(frozen=True)
class Skipped:
    """A combination that cannot be measured: `drafter` has no such `tree`, for a `reason`."""

    drafter: str
    tree: str
    reason: str


@dataclass(frozen=True)
class Results:
    """An evaluation; a setting has either the cells of all arms or none."""

    environment: dict[str, Any]
    plan: dict[str, Any]
    questions: dict[str, dict[str, Any]]  # of each set: file, questions, prompts, fingerprint, categories
    heads: dict[str, dict[str, Any]]  # of each draft head: algorithm, configuration, parameters, training
    skipped: list[Skipped]
    cells: list[Cell] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """Plan, questions, models, machine and code: only cells of equal ones can be compared."""
        values = [self.plan, self.questions, self.heads, comparable(self.environment)]
        return json.dumps(values, sort_keys=True)  # as JSON, because loaded results have lists instead of tuples

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
        """Read what `save` has written; raise `ValueError` for anything else, `OSError` if there is none."""
        results: Results = from_json(cls, json.loads((folder / RESULTS_FILE).read_bytes()), others=True)
        return results


def comparable(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for measurements to be compared: machine, threads, target model, code."""
    return {name: environment[name] for name in ("hardware", "threads", "dtype", "base", "versions", "commit")}


def write_json(path: Path, values: Any) -> None:
    """Write JSON atomically, each list of numbers on one line."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    text = re.sub(r'\[\n[^\[\]{}"]*\]', lambda found: " ".join(found[0].split()), text)
    write_whole(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))


@dataclass(frozen=True)
class Figures:
    """Derived figures of one cell."""

    cell: Cell
    plain: Cell  # plain decoding at the same setting
    rate: float  # tokens per second, median over rounds
    gamma: float  # speed relative to plain decoding
    beta: float | None  # new tokens per decode forward of the target model; None of older results without counts

    @property
    def beta_interval(self) -> Interval | None:
        """95 % interval of `beta`; None where the questions are few, or the prompts' counts are not known."""
        tokens, steps = (np.array(one) for one in (self.cell.tokens_by_prompt, self.cell.steps_by_prompt))
        if not steps.size:
            return None
        return bootstrap(self.cell.questions_asked, lambda picked: float(tokens[picked].sum() / steps[picked].sum()))

    @property
    def gamma_interval(self) -> Interval | None:
        """95 % interval of `gamma`; None where the questions are few, or one run has them all."""
        if self.cell.batch > 1:
            return None
        both = [np.array(one.rates) for one in (self.cell, self.plain)]  # [rounds, prompts]
        return bootstrap(
            self.cell.questions_asked,
            lambda picked: speedup(*(rates[:, picked].mean(axis=1).tolist() for rates in both)),
        )

    @property
    def faster(self) -> tuple[int, int]:
        """Questions, at larger batches rounds, in which this was faster than plain decoding, and all of them."""
        ours, theirs = (self._rates_of_trials(one) for one in (self.cell, self.plain))
        return int((ours > theirs).sum()), len(ours)

    def _rates_of_trials(self, cell: Cell) -> NDArray[np.float64]:
        """Tokens per second of each round, at batch 1 of each question over all its turns, samples and rounds."""
        tokens, seconds = np.array(cell.tokens, dtype=float), np.array(cell.seconds)  # [rounds, runs]
        if cell.batch > 1:
            made, taken = tokens[:, 0], seconds[:, 0]
        else:
            _, question = np.unique(np.asarray(self.cell.questions_asked), return_inverse=True)
            made, taken = (np.bincount(question, weights=one.sum(axis=0)) for one in (tokens, seconds))
        rates: NDArray[np.float64] = made / taken
        return rates


def figures(cells: Sequence[Cell]) -> list[Figures]:
    """Return the figures of all cells. Every setting must have a cell of plain decoding."""
    rates = {(cell.setting, cell.arm): list(map(mean, cell.rates)) for cell in cells}
    plain = {cell.setting: cell for cell in cells if cell.arm == PLAIN}
    found = []
    for cell in cells:
        ours, counts = rates[cell.setting, cell.arm], total(cell.counts.values())
        found.append(
            Figures(
                cell,
                plain[cell.setting],
                rate=median(ours),
                gamma=speedup(ours, rates[cell.setting, PLAIN]),
                beta=mean_acceptance_length(counts) if cell.counts else None,
            )
        )
    return found
