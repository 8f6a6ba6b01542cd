"""Do other losses and labels train a better head in the same time?

    python -m recipes.embedded.distill --base drafter/embedded/hybrid --output build/distilled-hybrid \\
        --distill-temperatures 0.0 0.8 --base-temperatures --invented 0 --minutes 5
    python -m studies.head_losses --data build/distilled-hybrid --output studies/results/head-losses

The head is that of the embedded hybrid, with fewer steps. Every arm sees the same texts and anchors in the same order,
and has its own loss or number of labels. β is simulated on held-out greedy texts.

- `positions`: a token's weight is what of a draft reaches it, not a power of its depth: the sum of Π (q + 1) / 2
  over drafts that are at least so long, where q is the head's probability of the text's own token (D-PACE). It is
  divided by the anchors, and not by the weights.
- `acceptance`: −log Σ min(p, q) over the labels, the probability that a sampled token is accepted, instead of the
  cross-entropy (arXiv 2602.23881). `schedule` goes over to it during the first half of the steps.
- `16 labels`: the target model's sixteen likeliest tokens, instead of four.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from drafter.embedded import EMBEDDED_HYBRID
from drafter.evaluation.environment import machine, surroundings
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.losses import LossSum
from drafter.target_model.loading import load_base
from recipes.embedded.train_head import batch_texts, read_recipes, read_texts, train_head

RECORD_FILE, TABLE_FILE = "head_losses.json", "head_losses.md"
_LEAST = 1e-6


@dataclass
class Loss:
    """A prefix loss in place of `drafter.ctc.losses._conditional`.

    Args:
        reached: Weigh tokens by what reaches them.
        acceptance: Share of the loss that is of the accepted mass, from the share of the steps that are done.
    """

    reached: bool
    acceptance: Callable[[float], float]
    done: float = 0.0

    def __call__(self, scores: Tensor, prefixes: Tensor, counted: Tensor, probs: Tensor, decay: float) -> LossSum:
        before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], 1)
        there, terms = counted.any(-1), torch.where(counted, scores - before[..., None], 0.0)
        losses, share = -(probs * terms).sum(-1), self.acceptance(self.done)
        if share:
            accepted = torch.minimum(terms.exp(), probs).where(counted, 0.0).sum(-1).clamp_min(_LEAST)
            losses = (1 - share) * losses - share * accepted.log().where(there, 0.0)
        if not self.reached:
            weights = decay ** torch.arange(scores.shape[1], dtype=scores.dtype) * there
            return LossSum((weights * losses).sum(), (weights[..., None] * probs * counted).sum())
        likely = torch.where(there, (prefixes - before).detach().exp(), 0.0)
        weights = ((likely + 1) / 2).where(there, 0.0).cumprod(1).flip(1).cumsum(1).flip(1)
        return LossSum((weights * losses).sum(), there.any(1).sum().to(losses))


ARMS: dict[str, tuple[Loss, dict[str, Any]]] = {
    "as it ships": (Loss(False, lambda done: 0.0), {}),
    "16 labels": (Loss(False, lambda done: 0.0), {"teacher": 16}),
    "positions": (Loss(True, lambda done: 0.0), {}),
    "positions, 16 labels": (Loss(True, lambda done: 0.0), {"teacher": 16}),
    "acceptance": (Loss(False, lambda done: 1.0), {}),
    "schedule": (Loss(False, lambda done: min(1.0, 2 * done)), {}),
}
"""Loss and settings of the training, by arm."""


@contextmanager
def _losing_by(loss: Loss, steps: int) -> Iterator[None]:
    def noted(texts: Any, step: int, count: int, seed: int) -> Any:
        loss.done = step / steps
        return batch_texts(texts, step, count, seed)

    with (
        patch("drafter.ctc.losses._conditional", loss),
        patch("recipes.embedded.train_head.batch_texts", noted),
    ):
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the arms, and write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of distilled texts")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--work", type=Path, default=Path("build/head-losses"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, texts, recipe = load_base(EMBEDDED_HYBRID), read_texts(args.data), read_recipes()["hybrid"]
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for arm in args.arms:
        loss, settings = ARMS[arm]
        settings = {**recipe.training, **settings, "steps": args.steps, "evaluate_every": args.steps}
        begun = time.process_time()
        with _losing_by(loss, args.steps):
            train_head(arm, replace(recipe, training=settings), base, texts, args.work)
        (record,) = json.loads((args.work / arm / "config.json").read_text())["training"]["history"]
        found.append({"arm": arm, "processor_seconds": round(time.process_time() - begun), **record})
        about = surroundings(torch.device("cpu"), shlex.join(["python", "-m", "studies.head_losses", *given]))
        everything = {"environment": about, "load": os.getloadavg(), "arms": found}
        write_json(args.output / RECORD_FILE, everything)
        (args.output / TABLE_FILE).write_text(page(everything), encoding="utf-8")


def page(record: dict[str, Any]) -> str:
    """Return the table with its heading."""
    about = record["environment"]
    rows = [
        {
            "loss": one["arm"],
            **{f"β, {nodes} draft tokens": f"{beta:.2f}" for nodes, beta in one["beta"].items()},
            "processor seconds": one["processor_seconds"],
        }
        for one in record["arms"]
    ]
    return "\n\n".join([
        "# Losses and labels of a head",
        f"{machine(about)}, {about['threads']} threads, load {record['load'][0]:.1f} at the end. "
        f"`{about['command']}`, commit {about['commit']}.",
        markdown_table(rows) + "\n",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
