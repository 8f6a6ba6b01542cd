"""What the adaptive budget is worth: whole runs against fixed numbers of nodes, and with other constants.

    python -m benchmarks.budgets --output benchmarks/results/budgets
    python -m benchmarks.budgets --model-code --rounds 4 --output benchmarks/results/budgets-model-code

Decoding is greedy, of GSM8K's test questions and of chat prompts, half of each. The policies share an engine,
in another order each round. The native decoder makes plain steps of a small base so cheap that drafting hardly pays.
With the model's own code it does.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed import prompts_of
from drafter.budget import adaptive
from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import Budget, FixedBudget, StepLoad, StepObservation
from drafter.budget.latency_table import LatencyTable
from drafter.devices import in_passing_thread
from drafter.drafters.contract import Ask
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all, room_for
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.statistics import BatchChoice, mean_acceptance_length, total
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE = "budgets.json", "budgets.md"
BATCHES = (1, 4, 16, 64)
FIXED = (0, 3, 7, 15, 31)
_FEWEST = 24
"""Least number of prompts of a run. A larger batch has twice as many as fill it."""
_DATA = Path(__file__).resolve().parents[1] / "data"
QUESTIONS = (_DATA / "gsm8k" / "test.jsonl", _DATA / "chat-prompts" / "questions.jsonl")


@dataclass
class Turns:
    """The budget of an engine that several budgets share, one at a time.

    Args:
        now: The one whose turn it is.
    """

    now: Budget

    def plan(self, load: StepLoad) -> Ask:
        """See `Budget`."""
        return self.now.plan(load)

    def observe(self, step: StepObservation) -> None:
        """See `Budget`."""
        self.now.observe(step)

    def choices(self) -> tuple[BatchChoice, ...]:
        """See `Budget`."""
        return self.now.choices()

    def renewed(self, member: int) -> None:
        """See `Budget`."""
        self.now.renewed(member)


@dataclass(frozen=True)
class Policy:
    """A budget to measure.

    Args:
        make: Of the table of this machine's latencies.
        constants: Constants of the adaptive budget that are other while it decides: name and value.
    """

    make: Callable[[LatencyTable], Budget]
    constants: tuple[tuple[str, float], ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Change the constants for a while."""
        before = [(name, getattr(adaptive, name)) for name, _ in self.constants]
        try:
            for name, value in self.constants:
                setattr(adaptive, name, value)
            yield
        finally:
            for name, value in before:
                setattr(adaptive, name, value)


def _adaptive(*constants: tuple[str, float]) -> Policy:
    return Policy(AdaptiveBudget, constants)


POLICIES: dict[str, Policy] = {
    "adaptive": _adaptive(),
    **{f"fixed {nodes}": Policy(lambda _, nodes=nodes: FixedBudget(nodes)) for nodes in FIXED},  # type: ignore[misc]
    "adaptive, pace 0.1": _adaptive(("_PACE", 0.1)),
    "adaptive, a tenth of the time for looks": _adaptive(("_LOOKS", 0.1)),
    "adaptive, hardly any looks": _adaptive(("_LOOKS", 1e-9), ("_LONGEST_PAUSE", 10**9)),
    "adaptive, gives up after one step": _adaptive(("_TRIED_TREES", 1), ("_FEWEST_STEPS", 1)),
    "adaptive, believes every latency": _adaptive(("_MOST", 1e9)),
}


@dataclass(frozen=True)
class Cell:
    """One policy at one batch size, in one round: tokens, seconds, tokens a step, and draft nodes a row and step."""

    policy: str
    batch: int
    round: int
    tokens: int
    seconds: float
    beta: float
    nodes: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="ctc", help="(default: %(default)s)")
    parser.add_argument("--model-code", action="store_true", help="run the base by its own code")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if "adaptive" not in args.policies:
        parser.error("--policies needs adaptive, which the others are compared with")
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    if args.model_code:
        base = in_passing_thread(lambda: BaseModel(base.model, base.name, native=False))
    command = shlex.join(["python", "-m", "benchmarks.budgets", *given])
    record: dict[str, Any] = {"environment": environment(base, command), "drafter": args.drafter, "cells": []}
    for batch in args.batches:
        cells = measure(base, tokenizer, args, batch)
        record["cells"] += [asdict(cell) for cell in cells]
        print(f"batch {batch}\n\n{policy_table(cells)}\n", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    write_table(args.output)


def measure(base: BaseModel, tokenizer: Any, args: argparse.Namespace, batch: int) -> list[Cell]:
    """Decode the same prompts by every policy, all of them in every round, and check that the tokens are the same."""
    requests = requests_of(tokenizer, max(_FEWEST, 2 * batch), args.max_new_tokens)

    def engine(budget: Budget | None) -> Engine:
        drafter = load_drafter(args.drafter, base, useful_nodes(base.device))
        return Engine(base, drafter, tokenizer, room_for(requests, batch), budget=budget)

    default = engine(None).budget
    assert isinstance(default, AdaptiveBudget)
    budgets = {name: POLICIES[name].make(default.table) for name in args.policies}
    turns = Turns(default)
    measured = engine(turns)
    cells, order, expected = [], list(budgets), None
    for turn in range(-1, args.rounds):  # the first one warms up
        random.Random(turn).shuffle(order)
        for name in order:
            turns.now = budgets[name]
            with POLICIES[name].applied():
                run = decode_all(measured, requests)
            expected = expected or run.outputs
            if run.outputs != expected:
                raise AssertionError(f"{name} gave other tokens at batch {batch}")
            counts = total(run.counts)
            nodes = counts.num_draft_tokens / counts.num_decode_steps
            if turn >= 0:
                beta = mean_acceptance_length(counts)
                cells.append(Cell(name, batch, turn, run.num_tokens, run.seconds, beta, nodes))
    return cells


def requests_of(tokenizer: Any, count: int, max_new_tokens: int) -> list[Request]:
    """Return `count` greedy requests, of all files in turn."""
    prompts = prompts_of(tokenizer, "short", count, QUESTIONS)
    return [Request(ids, SamplingParams(max_new_tokens)) for ids in prompts]


def policy_table(cells: Sequence[Cell]) -> str:
    """Return the policies of one batch size: medians over the rounds, and of ratios within a round."""
    by_policy = {
        name: [cell for cell in cells if cell.policy == name] for name in dict.fromkeys(c.policy for c in cells)
    }
    by_policy = {name: sorted(some, key=lambda cell: cell.round) for name, some in by_policy.items()}
    first = by_policy["adaptive"]
    return markdown_table(
        [
            {
                "policy": name,
                "tokens/s": f"{median(cell.rate for cell in some):.0f}",
                "÷ adaptive": f"{median(one.rate / other.rate for one, other in zip(some, first, strict=True)):.3f}",
                "β": f"{median(cell.beta for cell in some):.2f}",
                "nodes a row and step": f"{median(cell.nodes for cell in some):.1f}",
            }
            for name, some in by_policy.items()
        ]
    )


def write_table(folder: Path) -> None:
    """Write `budgets.md` from `budgets.json` in `folder`."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    cells = [Cell(**cell) for cell in record["cells"]]
    about = record["environment"]
    parts = [
        "# Budgets",
        f"{machine(about)}, {about['threads']} threads, {about['dtype']}; greedy; drafter `{record['drafter']}`; "
        f"medians of {1 + max(cell.round for cell in cells)} rounds, ratios within a round. `{about['command']}`, "
        f"commit {about['commit']}. All policies gave the same tokens.",
    ]
    for batch in dict.fromkeys(cell.batch for cell in cells):
        parts += [f"## Batch {batch}", policy_table([cell for cell in cells if cell.batch == batch])]
    (folder / TABLE_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
