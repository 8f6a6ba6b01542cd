"""Tree against chain against no drafts, of the same head: acceptance length and tokens per second.

    python -m benchmarks.trees --model MODEL --output benchmarks/results/trees

All arms decode the same prompts one after another, and another arm begins each turn. A tree and a chain of as many
draft tokens are compared run by run, where a run is one prompt at batch 1, and all prompts at larger batches: the
medians are of ratios within a turn, and a sign test says how probable so uneven a count is if neither is faster.
A chain ends where it becomes improbable, and then verifies fewer draft tokens than it may; a tree takes others instead.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.never_slower import DATA, KINDS
from drafter.devices import in_passing_thread
from drafter.drafters.registry import shipped_head
from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.intervals import sign_test
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import PLAIN, RESULTS_FILE, Arm, Cell, Plan, Results, Setting
from drafter.evaluation.tables import circumstances, markdown_table
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer

TABLE_FILE = "trees.md"
_FILES = {kind: file for kind, file in KINDS.items() if file is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write `results.json` and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RESULTS_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="target model (default: the embedded one)")
    parser.add_argument("--head", help="folder of a CTC head (default: the one that ships for the model)")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3, 5, 7, 15])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--kinds", nargs="+", choices=_FILES, default=list(_FILES))
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    head = args.head or shipped_head(base)
    if head is None:
        parser.error(f"no head ships for {args.model}: give one by --head")
    plan = Plan(
        (os.path.relpath(head),),  # a record names no folder of its machine
        ("exact", "chain"),
        tuple(args.draft_tokens),
        tuple(args.batches),
        tuple(args.temperatures),
        rounds=args.rounds,
        max_new_tokens=args.max_new_tokens,
    )
    # The second turn of a conversation would follow another answer than the model's.
    questions = {
        kind: [replace(one, turns=one.turns[:1]) for one in read_questions(DATA / _FILES[kind], args.prompts)]
        for kind in args.kinds
    }
    evaluation = Evaluation(base, tokenizer, questions, plan)
    results = evaluation.describe(shlex.join(["python", "-m", "benchmarks.trees", *given]), _FILES)
    for cells in evaluation.run():
        if isinstance(cells, Progress):
            continue
        results.cells.extend(cells)
        results.save(args.output)
        write_table(args.output)
        print(f"{cells[0].setting}: done", flush=True)


@dataclass(frozen=True)
class Comparison:
    """Trees against the chains of the same head with as many draft tokens, of one kind of text or several."""

    kind: str
    trees: Sequence[Cell]
    chains: Sequence[Cell]
    plain: Sequence[Cell]

    @property
    def ratios(self) -> list[float]:
        """Tokens per second of the tree ÷ those of the chain, of each run."""
        return [one / other for one, other in zip(_rates(self.trees), _rates(self.chains), strict=True)]

    @property
    def row(self) -> dict[str, object]:
        """The comparison as a row of a table."""
        faster, runs = sum(ratio > 1 for ratio in self.ratios), len(self.ratios)
        return {
            "text": self.kind,
            "draft tokens": self.trees[0].arm.nodes,
            "verified a step, chain": f"{_verified(self.chains):.1f}",
            "tree": f"{_verified(self.trees):.1f}",
            "acceptance length, chain": f"{_acceptance_length(self.chains):.2f}",
            "tree ": f"{_acceptance_length(self.trees):.2f}",
            "tokens/s, none": f"{median(_rates(self.plain)):.0f}",
            "chain": f"{median(_rates(self.chains)):.0f}",
            "tree  ": f"{median(_rates(self.trees)):.0f}",
            "tree ÷ chain": f"{median(self.ratios):.3f}",
            "tree faster": f"{faster} of {runs}",
            "p": f"{sign_test(faster, runs):.2g}",
            "draft ms a token, chain": f"{_draft_ms(self.chains):.2f}",
            "tree   ": f"{_draft_ms(self.trees):.2f}",
        }


def _verified(cells: Sequence[Cell]) -> float:
    """Draft tokens that a row's step verifies, on average."""
    sums = total(counts for cell in cells for counts in cell.counts.values())
    return sums.num_draft_tokens / sums.num_decode_steps


def _acceptance_length(cells: Sequence[Cell]) -> float:
    return mean_acceptance_length(total(counts for cell in cells for counts in cell.counts.values()))


def _rates(cells: Sequence[Cell]) -> list[float]:
    """Tokens per second of each run of all rounds."""
    return [rate for cell in cells for rates in cell.rates for rate in rates]


def _draft_ms(cells: Sequence[Cell]) -> float:
    stages = [cell.stages for cell in cells if cell.stages is not None]
    spent = sum(one.seconds["draft"] + one.seconds["tree"] for one in stages)
    return float(1e3 * spent / sum(one.tokens for one in stages))


def comparisons(cells: Sequence[Cell]) -> dict[tuple[float, int], list[Comparison]]:
    """Return the comparisons by temperature and batch size: of each kind of text, and of all together."""
    by_arm: dict[tuple[Setting, Arm], Cell] = {(cell.setting, cell.arm): cell for cell in cells}
    of_kinds: dict[tuple[float, int], dict[Arm, list[Cell]]] = {}
    for (setting, arm), cell in by_arm.items():
        if arm.tree == "exact":
            of_kinds.setdefault(setting[:2], {}).setdefault(arm, []).append(cell)
    found: dict[tuple[float, int], list[Comparison]] = {}
    for place, arms in of_kinds.items():
        for arm, trees in arms.items():
            chains = [by_arm[cell.setting, replace(arm, tree="chain")] for cell in trees]
            plain = [by_arm[cell.setting, PLAIN] for cell in trees]
            each = zip([one.questions for one in trees], trees, chains, plain, strict=True)
            rows = [Comparison(kind, [one], [other], [none]) for kind, one, other, none in each]
            found.setdefault(place, []).extend([*rows, Comparison("all", trees, chains, plain)])
    return found


def write_table(folder: Path) -> None:
    """Write `trees.md` from `results.json` in `folder`."""
    results = Results.load(folder)
    found, where = comparisons(results.cells), results.environment
    differing = sum(cell.differing_tokens or 0 for cell in results.cells)
    parts = [
        "# Tree against chain",
        f"{circumstances(results)}. `{where['command']}`, commit {where['commit']}. Tokens that differ from plain "
        f"decoding's: {differing}. An acceptance length is 1 without drafts.",
        "A chain has at most as many levels as the head, and ends where it becomes improbable, so that it verifies "
        "fewer draft tokens than it may. A tree takes others in their places.",
    ]
    for (temperature, batch), some in found.items():
        parts += [f"## Temperature {temperature:g}, batch {batch}", markdown_table([one.row for one in some])]
    (folder / TABLE_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
