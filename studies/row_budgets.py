"""Worth of a number of draft tokens for each row: the most probable ones of a whole batch, not of each row.

    python -m studies.row_budgets --output studies/results/row-budgets

Rows of several kinds of text are decoded together, each with a large tree. Of these trees, k draft tokens a row are
counted as if only they had been verified: once the first k of each row, and once the most probable of all rows. To
choose among rows, a drafter must draft more than is verified, here twice as many. What both cost is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.never_slower import KINDS, requests_of
from drafter.budget.contract import FixedBudget
from drafter.devices import in_passing_thread
from drafter.drafters.contract import Ask, DraftContext
from drafter.drafters.registry import load_drafter, shipped_head, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.warm_up import step_costs
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.tree.token_tree import TokenTree

RECORD_FILE, TABLE_FILE = "row-budgets.json", "row-budgets.md"
BATCHES, VERIFIED = (2, 4, 16), (3, 7)

Trees = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]
"""Of each step: log prefix probabilities `[B, k]` of draft tokens, and whether the text has them."""


@dataclass(frozen=True)
class Cell:
    """One number of draft tokens at one batch size. Milliseconds are of a step."""

    batch: int
    verified: int
    steps: int
    each: float  # accepted draft tokens per row, of the same number in each row
    shared: float  # the same, of the most probable ones of all rows
    plain_ms: float
    verify_ms: float
    draft_ms: float  # of `verified` draft tokens
    wide_draft_ms: float  # of twice as many

    @property
    def gain(self) -> float:
        """Tokens per second with a number for each row ÷ those with the same number in each."""
        shared = (1 + self.shared) / (self.verify_ms + self.wide_draft_ms)
        return shared * (self.verify_ms + self.draft_ms) / (1 + self.each)

    @property
    def speedup(self) -> float:
        """γ of the same number in each row."""
        return (1 + self.each) * self.plain_ms / (self.verify_ms + self.draft_ms)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument(
        "--model", default=str(EMBEDDED_BASE), help="with a head that ships (default: the embedded one)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    command = shlex.join(["python", "-m", "studies.row_budgets", *given])
    record: dict[str, Any] = {"environment": environment(base, command), "cells": []}
    for batch in args.batches:
        record["cells"] += [asdict(cell) for cell in measure(base, tokenizer, args, batch)]
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    write_table(args.output)


def measure(base: BaseModel, tokenizer: Any, args: argparse.Namespace, batch: int) -> list[Cell]:
    """Decode prompts of all kinds in turn, and count both ways."""
    by_kind = [requests_of(tokenizer, kind, args.prompts, args.max_new_tokens) for kind in KINDS]
    requests = [request for some in zip(*by_kind, strict=True) for request in some]
    longest = max(len(one.prompt_ids) for one in requests) + args.max_new_tokens
    most = useful_nodes(base.device)
    head = load_drafter(str(shipped_head(base)), base, most)
    config = EngineConfig(batch, longest, max_queue=len(requests))
    engine = Engine(base, head, tokenizer, config, budget=FixedBudget(most))
    latencies = step_costs(engine._device, None, None).at(batch)
    trees = recorded(engine, requests, batch)
    counts, cells = (0, 3, 4, 7, 9, 11, 15), []
    for verified in VERIFIED:
        each = float(np.mean([accepted[:, :verified].sum() / batch for _, accepted in trees]))
        shared = float(np.mean([most_probable(*tree, verified * batch) / batch for tree in trees]))
        place, wide = counts.index(verified), counts.index(2 * verified + 1)
        seconds = latencies.verify[0], latencies.verify[place], latencies.draft[0, place], latencies.draft[0, wide]
        cells.append(Cell(batch, verified, len(trees), each, shared, *(1e3 * float(one) for one in seconds)))
    return cells


def recorded(engine: Engine, requests: Sequence[Any], batch: int) -> Trees:
    """Decode; return the trees of all steps of `batch` rows, and what the text has of them."""
    proposed: list[TokenTree] = []
    propose = engine.drafter.propose

    def record(context: DraftContext, ask: Ask) -> TokenTree:
        proposed.append(propose(context, ask))
        return proposed[-1]

    engine.drafter.propose = record  # type: ignore[method-assign]
    found: Trees = []

    class Counting(FixedBudget):
        def observe(self, step: Any) -> None:
            if step.trees is not None and len(step.trees.accepted) == batch == len(proposed[-1].tokens):
                found.append((proposed[-1].log_probs[:, 1:].numpy(), step.trees.accepted))

    engine.budget = Counting(useful_nodes(engine.base.device))
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    for handle in handles:
        handle.result(0)
    return found


def most_probable(log_probs: npt.NDArray[np.float32], accepted: npt.NDArray[np.bool_], count: int) -> int:
    """Return how many of the `count` most probable draft tokens of a batch the text has."""
    return int(accepted.ravel()[np.argsort(-log_probs.ravel(), kind="stable")[:count]].sum())


def write_table(folder: Path) -> None:
    """Write `row-budgets.md` from `row-budgets.json` in `folder`."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    about, cells = record["environment"], [Cell(**cell) for cell in record["cells"]]
    rows = [
        {
            "batch": cell.batch,
            "draft tokens a row": cell.verified,
            "accepted, as many in each row": f"{cell.each:.2f}",
            "accepted, most probable of all rows": f"{cell.shared:.2f}",
            "tokens a step": f"{(1 + cell.shared) / (1 + cell.each):.2f}",
            "draft ms": f"{cell.draft_ms:.1f}",
            "draft ms, twice as many": f"{cell.wide_draft_ms:.1f}",
            "verify ms": f"{cell.verify_ms:.1f}",
            "tokens/s": f"{cell.gain:.2f}",
            "γ without": f"{cell.speedup:.2f}",
        }
        for cell in cells
    ]
    text = (
        f"# A number of draft tokens for each row\n\n{machine(about)}, {about['threads']} threads, {about['dtype']}; "
        f"greedy, rows of {len(KINDS)} kinds of text together, the head that ships. `{about['command']}`, commit "
        f"{about['commit']}. *Tokens a step* and *tokens/s* are relative to as many draft tokens in each row; *γ "
        f"without* is what these are worth beside plain decoding.\n\n{markdown_table(rows)}\n"
    )
    (folder / TABLE_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
