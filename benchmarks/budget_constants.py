"""What each tuned constant of the adaptive budget is worth, in simulated worlds with a virtual clock.

    python -m benchmarks.budget_constants --output benchmarks/results/budget-constants

In each world the costs of steps and the acceptance of drafters are known. Each constant is halved, doubled, and all but
switched off, and the speed in each world is compared with that of the constant as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from drafter.budget import adaptive, worth
from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import SHADOW_ROWS, ScoredTrees, StepObservation, StepSeconds
from drafter.budget.latency_table import LatencyTable
from drafter.drafters.contract import Ask, MeasuredWorth
from drafter.evaluation.environment import surroundings
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table

RECORD_FILE, TABLE_FILE = "budget-constants.json", "budget-constants.md"
TABLE = LatencyTable(
    batches=np.array([1.0, 8.0]),
    nodes=(0, 3, 7, 15),
    verify=np.array([[1.0, 1.1, 1.3, 1.7], [2.0, 3.0, 5.0, 9.0]]),
    draft=np.array([[[0.0, 0.1, 0.1, 0.1]] * 2]),
)


def table_of(drafting: Sequence[float], base: LatencyTable = TABLE) -> LatencyTable:
    """`base` for members that draft in so many seconds, at all batch sizes."""
    return replace(base, draft=np.array([[[0.0, one, one, one]] * len(base.batches) for one in drafting]))


@dataclass
class World:
    """Drafters of chains: a member's token is right with probability `right[member]` if those before it are.

    Args:
        right: Of each member.
        table: What the budget is told.
        real: What steps take, if not that.
        silent: Share of trees without a draft token.
        noise: Standard deviation of the logarithm of steps' times; one step in 100 takes ten times as long, then.
        cold: Share of a plain step by which the first two after drafts are slower.
        asked: Of the last run.
    """

    right: Sequence[float]
    table: LatencyTable = TABLE
    real: LatencyTable | None = None
    silent: float = 0.0
    noise: float = 0.0
    cold: float = 0.0
    seed: int = 0
    asked: list[Ask] = field(default_factory=list)
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self._noise = np.random.default_rng(self.seed)
        self._plain = 0  # steps since the last drafts

    @property
    def names(self) -> list[str]:
        return [f"member {member}" for member in range(len(self.right))]

    def budget(self, *, shadows: bool = True, known: Sequence[MeasuredWorth | None] = ()) -> AdaptiveBudget:
        return AdaptiveBudget(self.table, self.names, shadows=shadows, known=known)

    def trees(self, ask: Ask, rows: int) -> ScoredTrees:
        speaks = self.random.random(rows) >= self.silent
        accepted = (self.random.random((rows, ask.nodes)) < self.right[ask.member]).cumprod(1).astype(bool)
        return ScoredTrees(ask.member, np.where(speaks, ask.nodes, 0), accepted & speaks[:, None])

    def step(self, budget: AdaptiveBudget, rows: int) -> tuple[float, float]:
        """Decode a step; return its tokens per row and its seconds."""
        real = (self.real or self.table).at(rows)
        ask, trees, shadow = budget.plan(rows), None, None
        shadows: tuple[ScoredTrees, ...] = ()
        self.asked.append(ask)
        rest, drafting, tokens = float(real.verify[0]), 0.0, rows
        self._plain = 0 if ask.nodes or ask.shadow is not None else self._plain + 1
        if ask.nodes:
            trees = self.trees(ask, rows)
            size = self.table.nodes.index(ask.nodes)
            filled = (trees.drafted > 0).mean()
            rest += filled * (float(real.verify[size]) - rest)
            drafting, tokens = float(real.draft[ask.member, size]), rows + int(trees.accepted.sum())
        elif self._plain <= 2:
            rest *= 1 + self.cold
        if ask.shadow is not None:
            seconds = float(real.shadow[ask.shadow.member, self.table.nodes.index(ask.shadow.nodes)])
            shadow, shadows = StepSeconds(0.0, seconds, 0.0), (self.trees(ask.shadow, min(rows, SHADOW_ROWS)),)
        slower = 1.0
        if self.noise:
            slower = math.exp(self._noise.normal(0, self.noise)) * (10 if self._noise.random() < 0.01 else 1)
        seconds_of = StepSeconds(0.0, slower * drafting, slower * rest)
        budget.observe(StepObservation(rows, ask, tokens, trees, seconds_of, shadow, shadows))
        return tokens / rows, rest + drafting + (0.0 if shadow is None else shadow.all)

    def run(self, budget: AdaptiveBudget, rows: int, steps: int) -> float:
        """Return tokens per second and row, relative to plain decoding's: γ."""
        self.asked = []
        tokens, seconds = zip(*(self.step(budget, rows) for _ in range(steps)), strict=True)
        return float(sum(tokens) / sum(seconds) * self.plain_seconds(rows))

    def plain_seconds(self, rows: int) -> float:
        return float((self.real or self.table).at(rows).verify[0])

    def alone(self, rows: int, member: int) -> float:
        """γ of the best fixed number of draft tokens of one member."""
        real = (self.real or self.table).at(rows)
        gains = [sum(self.right[member] ** depth for depth in range(1, nodes + 1)) for nodes in self.table.nodes[1:]]
        seconds = (real.verify + real.draft[member])[1:]
        rates = [(1 + gain) / one for gain, one in zip(gains, seconds, strict=True)]
        return float(max(rates) * self.plain_seconds(rows))

    def best(self, rows: int) -> float:
        return max(1.0, *(self.alone(rows, member) for member in range(len(self.right))))

    def drafted(self, member: int) -> int:
        return sum(ask.nodes > 0 and ask.member == member for ask in self.asked)

    def expected(self, ask: Ask) -> float:
        """Tokens per row that a step with this request brings on average."""
        right = self.right[ask.member]
        return 1 + (1 - self.silent) * sum(right**depth for depth in range(1, ask.nodes + 1))


@dataclass(frozen=True)
class Scenario:
    """Drafters `[M]` that take `drafting` `[M]` seconds, and are right with the probabilities of each phase in turn."""

    name: str
    drafting: tuple[float, ...]
    phases: tuple[tuple[float, ...], ...]
    steps: int = 600  # of each phase
    rows: tuple[int, ...] = (1, 8)
    shadows: bool = True
    known: tuple[MeasuredWorth | None, ...] = ()
    real: LatencyTable | None = None  # what steps take from the second phase on, or in the only one
    sure: bool = True  # the table that the budget is told
    noise: float = 0.0
    cold: float = 0.0

    def speed(self, rows: int, seed: int) -> float:
        """Return tokens per second over those of plain decoding, by expected tokens: by chance less noisy."""
        table = replace(table_of(self.drafting), sure=self.sure)
        world = World(self.phases[0], table, noise=self.noise, cold=self.cold, seed=seed)
        budget = world.budget(shadows=self.shadows, known=self.known)
        tokens = seconds = plain = 0.0
        for phase, right in enumerate(self.phases):
            world.right = right
            if phase or len(self.phases) == 1:
                world.real = self.real
            for _ in range(self.steps):
                taken = world.step(budget, rows)[1]
                brought = world.expected(world.asked[-1])
                tokens, seconds, plain = tokens + brought, seconds + taken, plain + brought * world.plain_seconds(rows)
        return plain / seconds


_LIE = MeasuredWorth((3, 7, 15), (1.5, 2.5, 3.0))
_SLOW_AT_START = replace(TABLE, verify=TABLE.verify + 40.0)
_DEAR_TREES = replace(TABLE, verify=np.array([[1.0, 1.8, 2.6, 4.2], [2.0, 5.0, 9.0, 17.0]]))
_DEAR_PLAIN = replace(TABLE, verify=TABLE.verify + np.array([[1.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 4.0]]))
_TOLD = MeasuredWorth((3, 7, 15), (0.9, 1.1, 1.2))
SCENARIOS = (
    Scenario("one drafter, useless", (0.1,), ((0.02,),)),
    Scenario("one drafter, middling", (0.1,), ((0.5,),)),
    Scenario("one drafter, good", (0.1,), ((0.9,),)),
    Scenario("one drafter, good, noisy clock, cold caches", (0.1,), ((0.8,),), noise=0.3, cold=0.3, steps=1500),
    Scenario("one drafter, about as fast as none, noisy clock", (0.1,), ((0.42,),), noise=0.3, cold=0.3, steps=1500),
    Scenario("the first of three", (0.1, 0.01, 0.01), ((0.8, 0.3, 0.2),), steps=1000),
    Scenario("the last of three", (0.3, 0.01, 0.01), ((0.3, 0.2, 0.8),), steps=1000),
    Scenario("the last of three, verified only", (0.3, 0.01, 0.01), ((0.3, 0.2, 0.8),), steps=1000, shadows=False),
    Scenario("the better one is too dear", (1.5, 0.01), ((0.8, 0.7),), steps=1000),
    Scenario("four useless ones, briefly", (0.2, 0.05, 0.05, 0.25), ((0.02,) * 4,), steps=100),
    Scenario("four useless ones, verified only", (0.2, 0.05, 0.05, 0.25), ((0.02,) * 4,), steps=600, shadows=False),
    Scenario("one of four, briefly", (0.2, 0.05, 0.05, 0.25), ((0.6, 0.3, 0.2, 0.25),), steps=100),
    Scenario("measured as good, and useless", (0.1, 0.1), ((0.0, 0.0),), known=(_LIE, None), steps=300),
    Scenario("the text changes between two", (0.05, 0.05), ((0.8, 0.1), (0.1, 0.8)), steps=1000),
    Scenario("good at last", (0.1, 0.1), ((0.0, 0.0), (0.9, 0.0)), steps=1000),
    Scenario("bad at last", (0.1, 0.1), ((0.9, 0.0), (0.0, 0.0)), steps=1000),
    Scenario("drafting takes longer than was measured", (0.1,), ((0.6,),), real=table_of([3.0])),
    Scenario(
        "trees are dearer than when the table was made",
        (0.1,),
        ((0.5,),),
        200,
        known=(_TOLD,),
        real=_DEAR_TREES,
        sure=False,
    ),
    Scenario("plain steps are dearer than then", (0.1,), ((0.3,),), 200, known=(_TOLD,), real=_DEAR_PLAIN, sure=False),
    Scenario("plain steps become slow", (0.1,), ((0.25,), (0.25,)), real=_SLOW_AT_START, steps=1000),
)
"""Worlds, each of a few hundred steps or more."""


@dataclass(frozen=True)
class Change:
    """Another value of a constant, and the worlds that become slowest and fastest by it.

    Speeds are divided by those with the constant as it is.
    """

    constant: str
    value: float
    changed: float
    slowest: float
    slowest_world: str
    fastest: float
    fastest_world: str
    mean: float  # of all worlds


def constants() -> dict[str, float]:
    """Return the tuned constants of the budget's modules, by module and name."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in (adaptive, worth)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float)
    }


def others(value: float) -> list[float]:
    """Return half of a constant, twice as much, and next to nothing: 0, or 1 of what is counted."""
    if isinstance(value, int):
        return sorted({max(value // 2, 1), 2 * value, 1} - {value})
    return [1e-6, value / 2, 2 * value]


def speeds(
    scenarios: Sequence[Scenario], seeds: int, constant: str | None = None, value: float = 0.0
) -> dict[str, float]:
    """Return the mean speed in each world, by its name and the number of rows, with another value of a constant."""
    patch = nullcontext() if constant is None else mock.patch(f"drafter.budget.{constant}", value)
    with patch:
        return {
            f"{one.name}, {rows} rows": float(np.mean([one.speed(rows, seed) for seed in range(seeds)]))
            for one in scenarios
            for rows in one.rows
        }


def compared(constant: str, value: float, changed: float, kept: dict[str, float], found: dict[str, float]) -> Change:
    """Return what another value of a constant does."""
    ratios = {world: found[world] / speed for world, speed in kept.items()}
    slowest, fastest = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    mean = float(np.mean([*ratios.values()]))
    return Change(constant, value, changed, ratios[slowest], slowest, ratios[fastest], fastest, mean)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each world (default: %(default)s)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    tried = [(name, value, changed) for name, value in constants().items() for changed in others(value)]
    with ProcessPoolExecutor() as pool:
        first = pool.submit(speeds, SCENARIOS, args.seeds)
        runs = [pool.submit(speeds, SCENARIOS, args.seeds, name, changed) for name, _, changed in tried]
        kept = first.result()
        changes = [compared(*one, kept, run.result()) for one, run in zip(tried, runs, strict=True)]
    command = shlex.join(["python", "-m", "benchmarks.budget_constants", *given])
    record = {
        "environment": surroundings(torch.device("cpu"), command),
        "speeds": kept,
        "changes": [asdict(change) for change in changes],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    write_table(args.output)


def write_table(folder: Path) -> None:
    """Write `budget-constants.md` from `budget-constants.json` in `folder`."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    about = record["environment"]
    rows = [
        {
            "constant": f"`{one.constant}`",
            "value": f"{one.value:g}",
            "instead": f"{one.changed:g}",
            "slowest": f"{one.slowest:.3f} ({one.slowest_world})",
            "fastest": f"{one.fastest:.3f} ({one.fastest_world})",
            "mean": f"{one.mean:.4f}",
        }
        for one in (Change(**change) for change in record["changes"])
    ]
    worlds = [{"world": world, "γ": f"{speed:.3f}"} for world, speed in record["speeds"].items()]
    text = (
        "# Constants of the adaptive budget\n\nSimulated worlds with a virtual clock: speed with another value of a "
        f"constant ÷ speed with its own. `{about['command']}`, commit {about['commit']}. Another value changes what is "
        "asked for, and so which random numbers come: with few seeds, the worlds with a noisy clock differ by chance "
        f"as well, by how much was not measured.\n\n{markdown_table(rows)}\n\n"
        f"Speed ÷ plain decoding's, with all constants as they are:\n\n{markdown_table(worlds)}\n"
    )
    (folder / TABLE_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
