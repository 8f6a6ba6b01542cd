"""From the head that ships on: what makes more of the same steps?

    python -m recipes.smollm2 distil --rounds 1
    python -m studies.head_arms --model ~/.cache/drafter/smollm2-135m-instruct \\
        --texts build/smollm2/round-01/answers --output studies/results/head-arms-smollm2

Every arm goes on from the shipped head, sees the same texts in the same order, and has its own part that is new. What
is new begins at zero, so that all arms begin with the same drafts. β is simulated on the target model's answers to
held-out questions.

- `as it ships`: the same head, trained on.
- `4 labels`, `8 labels`: the joint network knows so many last labels instead of two.
- `layers`: the frames read the outputs of two inner layers of the target model too, a third and two thirds up.
- `replayed`: anchors are drawn where drafting with the shipped head has begun a step, which is where a draft was
  rejected before.
- `pairs`: the other weights stay. The sixteen likeliest tokens of each frame are scored again by a product of rank 256
  of the last label and the token, which cross-entropy over the sixteen has learned.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.heads import answers
from drafter.ctc.head import CTCHead, FrameLattice
from drafter.drafters.target import Target
from drafter.embedded import OTHER_HEADS
from drafter.evaluation.environment import machine, surroundings
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import load_head
from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead
from drafter.heads.frame_head import last_tokens
from drafter.heads.losses import DraftBatch, hard_labels
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.text.tokenizers import load_tokenizer
from drafter.training.loop import TorchOptimiser, TrainingStep, train, training_layers
from drafter.training.settings import TrainingSettings
from drafter.training.targets import (
    RegeneratedText,
    accepted_depths,
    anchor_draws,
    draft_batch,
    simulated_beta,
    walked_batches,
)
from recipes.embedded.train_head import batch_texts, with_hidden_states

RECORD_FILE, TABLE_FILE = "head_arms.json", "head_arms.md"
ARMS = ("as it ships", "4 labels", "8 labels", "layers", "replayed", "pairs")
NODES = (3, 7, 15)
CANDIDATES, RANK = 16, 256
"""Of the selector over pairs."""
SHIPPED = OTHER_HEADS / "smollm2-135m-instruct"
_DATA = Path(__file__).resolve().parents[1] / "data"
HELD_OUT = {
    "questions": _DATA / "gsm8k" / "test.jsonl",
    "chat": _DATA / "chat-prompts" / "questions.jsonl",
    "records": _DATA / "drafter-prompts" / "records.jsonl",
    "code": _DATA / "drafter-prompts" / "edits.jsonl",
    "rewriting": _DATA / "drafter-prompts" / "rewrites.jsonl",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the arms, and write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the target model's folder")
    parser.add_argument(
        "--head", type=Path, default=OTHER_HEADS / "smollm2-135m-instruct", help="(default: %(default)s)"
    )
    parser.add_argument("--texts", type=Path, required=True, help="output of `drafter distill`")
    parser.add_argument("--most-texts", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--work", type=Path, default=Path("build/head-arms"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="(default: %(default)s)")
    parser.add_argument("--questions", type=int, default=8, help="held-out ones of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    base = load_base(args.model)
    settings = TrainingSettings(
        steps=args.steps, texts_per_step=8, learning_rate=5e-4, warmup_steps=20, teacher=4, precision="bf16"
    )
    inner = (base.num_layers // 3 - 1, 2 * base.num_layers // 3 - 1)
    held_out = {
        kind: with_hidden_states(base, asked, args.work, (LM_HEAD_INPUT, *inner))
        for kind, asked in _held_out(base, args.model, args.questions).items()
    }
    texts = sorted(_read_texts(args.texts)[: args.most_texts], key=lambda text: len(text.tokens))
    texts = with_hidden_states(base, texts, args.work, (LM_HEAD_INPUT, *inner))
    found: list[dict[str, Any]] = []
    for arm in ("shipped", *args.arms):
        head = load_head(args.head, base)
        assert isinstance(head, CTCHead)
        begun = time.process_time()
        if arm != "shipped":
            torch.manual_seed(settings.seed)
            head = _train(arm, head, base, texts, inner, settings)
        seconds = round(time.process_time() - begun)
        found.append({
            "arm": arm,
            "parameters": sum(one.numel() for one in head.parameters()),
            "processor_seconds": seconds,
            "beta": {kind: _betas(head, base, asked) for kind, asked in held_out.items()},
        })  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
        about = surroundings(torch.device("cpu"), shlex.join(["python", "-m", "studies.head_arms", *given]))
        everything = {"environment": about, "load": os.getloadavg(), "settings": asdict(settings), "arms": found}
        write_json(args.output / RECORD_FILE, everything)
        (args.output / TABLE_FILE).write_text(page(everything), encoding="utf-8")


def _read_texts(folder: Path) -> list[RegeneratedText]:
    columns = ["request_id", "prompt_token_ids", "token_ids"]
    rows = pyarrow.parquet.read_table(folder / "data", columns=columns).sort_by("request_id").to_pylist()
    texts = [RegeneratedText(one["prompt_token_ids"] + one["token_ids"], len(one["prompt_token_ids"])) for one in rows]
    return [text for text in texts if len(text.anchors) and len(text.tokens) <= 512]


def _held_out(base: BaseModel, model: str, count: int) -> dict[str, list[RegeneratedText]]:
    tokenizer = load_tokenizer(model)
    return {kind: answers(base, tokenizer, count, 64, file) for kind, file in HELD_OUT.items()}


def _betas(head: DraftHead, base: BaseModel, texts: Sequence[RegeneratedText]) -> dict[str, float]:
    with patch("drafter.ctc.head.FrameLattice", PairLattice if isinstance(head, PairHead) else FrameLattice):
        betas = simulated_beta(head, base, texts, NODES)
    return {str(nodes): round(beta, 3) for nodes, beta in betas.items()}


# The arms.


def _train(
    arm: str,
    shipped: CTCHead,
    base: BaseModel,
    texts: list[RegeneratedText],
    inner: tuple[int, ...],
    settings: TrainingSettings,
) -> CTCHead:
    head, step_of = shipped, TrainingStep(base, shipped, settings)
    if arm.endswith("labels"):
        head = with_labels(shipped, int(arm.split()[0]), base)
        step_of = TrainingStep(base, head, settings)
    elif arm == "layers":
        read_layers(head, inner)
    elif arm == "pairs":
        head = PairHead(shipped, base)
        step_of = PairStep(base, head, settings)
    head.train()
    if arm != "pairs":
        head.requires_grad_(True)
    width = len(training_layers(head, settings)) * base.hidden_size
    seen = [replace(text, hidden=text.hidden[:, :width]) for text in texts if text.hidden is not None]
    if arm == "replayed":
        seen = replayed(head, base, seen)
    optimiser = TorchOptimiser(step_of, settings)

    def steps() -> Iterator[list[DraftBatch]]:
        for step in range(settings.steps):
            chosen = batch_texts(seen, step, settings.texts_per_step, settings.seed)
            draws = anchor_draws(settings.seed, step, range(len(chosen)))
            yield [draft_batch(chosen, head.config.depth, 24, draws)]

    for _ in train(optimiser, steps(), replace(settings, evaluate_every=settings.steps), dict):
        pass
    return head.eval()


def with_labels(head: CTCHead, count: int, base: BaseModel) -> CTCHead:
    """Return the head with `count` labels in its joint network; the weights of the older ones are zero."""
    grown = CTCHead(replace(head.config, label_context=count))
    grown.hidden_layers, weights = head.hidden_layers, head.state_dict()
    known = weights["joint_labels.weight"]
    weights["joint_labels.weight"] = torch.cat([known.new_zeros(len(known), (count - 2) * base.hidden_size), known], 1)
    grown.load_state_dict(weights)
    assert grown.vocabulary is not None
    grown.vocabulary.borrow(base)
    return grown


def read_layers(head: CTCHead, inner: tuple[int, ...]) -> None:
    """Let the head's module read the outputs of more layers, by a projection that is zero at first."""
    module: Any = head.module
    width = head.config.hidden_size
    head.hidden_layers = (LM_HEAD_INPUT, *inner)
    norm, more = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(len(inner) * width, width, bias=False)
    nn.init.zeros_(more.weight)
    module.more, fuse = more, module.fuse

    def fused(embeddings: Tensor, hidden: Tensor) -> Tensor:
        last, others = hidden.split([width, len(inner) * width], -1)
        return fuse(embeddings, last) + more(norm(others.unflatten(-1, (len(inner), width))).flatten(-2))  # type: ignore[no-any-return]

    module.fuse = fused


@dataclass(frozen=True)
class ReplayedText(RegeneratedText):
    """A text whose anchors are the places where steps of decoding have begun."""

    begun: Sequence[int] = ()

    @property
    def anchors(self) -> Sequence[int]:  # type: ignore[override]
        return self.begun


@torch.no_grad()
def replayed(head: CTCHead, base: BaseModel, texts: Sequence[RegeneratedText]) -> list[RegeneratedText]:
    """Return texts, sorted by length, with the places where steps begin that draft seven tokens with the head."""
    found: list[RegeneratedText] = []
    for batch in walked_batches(texts, head.config.depth, at_once=4):
        assert batch.hidden is not None
        hidden = batch.hidden.to(base.dtype)
        trees = head.trees_at(base, batch.tokens, hidden, batch.anchors, 8)
        depths = accepted_depths(trees, batch.targets.flatten(0, 1), batch.lengths.flatten(), [7])
        for row, row_depths in enumerate(depths.view(batch.anchors.shape).tolist()):
            text, begun, at = texts[len(found)], [], 0
            while at < int((batch.lengths[row] > 0).sum()):
                begun.append(text.anchors[at])
                at += row_depths[at] + 1
            found.append(ReplayedText(text.tokens, text.prompt_length, text.hidden, begun=begun))
    return found


class PairHead(CTCHead):
    """A trained head whose candidates are scored again by pairs with the label before them.

    A table of products takes no step a depth: what `left` says of a label is known when the label is.
    """

    def __init__(self, head: CTCHead, base: BaseModel) -> None:
        super().__init__(head.config)
        self.load_state_dict(head.state_dict())
        self.requires_grad_(False)
        assert self.vocabulary is not None
        self.vocabulary.borrow(base)
        size = len(self.vocabulary.tokens)
        self.left, self.right = nn.Embedding(base.vocab_size, RANK), nn.Embedding(size, RANK)
        nn.init.normal_(self.right.weight, std=RANK**-0.5)
        nn.init.zeros_(self.left.weight)

    def native_search(self, base: Target, tree: Tree) -> None:
        """There is none: the native library does not know of pairs."""

    def again(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return logits `[M, F, V]` after labels `before` `[M]`, with those of each frame's candidates scored again."""
        best = logits.topk(CANDIDATES, -1)
        pairs = (self.right(best.indices) @ self.left(before)[:, None, :, None])[..., 0]
        # The candidates keep their probability together, as all others do.
        values = best.values + pairs
        values = values + (best.values.logsumexp(-1, keepdim=True) - values.logsumexp(-1, keepdim=True))
        return logits.scatter(-1, best.indices, values.to(logits.dtype))


class PairStep(TrainingStep):
    """The loss of a selector: cross-entropy of the right token among a frame's candidates, after the true label."""

    def forward(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        head = self.head
        assert isinstance(head, PairHead)
        depth = head.config.depth
        labels = hard_labels(batch.targets)
        drafted, _ = head.in_draft_ids(batch, labels)
        real = drafted.lengths > 0
        assert batch.hidden is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = batch.hidden.to(self._base.dtype)
            states = head.module(self._base.embed(batch.tokens), hidden, batch.anchors, depth)[real]
            count = head.config.label_context
            known = last_tokens(batch.tokens, batch.anchors, count)[real]
            text = torch.cat([known, batch.targets[real]], 1)
            terms = head.label_terms(self._base, text.unfold(1, count, 1)[:, :depth])
            joined, _ = head.joint(states, head.joint_frames(states) + terms)
            logits = head.output(self._base).lm_head(head.norm(joined)).float()
        before, targets = text[:, count - 1 : count - 1 + depth], drafted.targets[real]
        scored = head.again(logits.flatten(0, 1)[:, None], before.flatten())[:, 0]
        found = (logits.topk(CANDIDATES, -1).indices == targets[..., None]).any(-1)
        reached = torch.arange(depth) < drafted.lengths[real][:, None]
        losses = cross_entropy(scored, targets.flatten(), reduction="none")[(found & reached).flatten()]
        return losses.sum(), torch.tensor(float(len(losses)))


class PairLattice(FrameLattice):
    """The lattice of a head with its selector."""

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        probs, blank = super().score(first, stop, rows, state)
        assert isinstance(self._head, PairHead)
        return self._head.again(probs.log(), state[:, -1]).exp(), blank


def page(record: dict[str, Any]) -> str:
    """Return the tables with their heading."""
    about, settings = record["environment"], record["settings"]
    first = record["arms"][0]["beta"]
    rows = [
        {"arm": one["arm"], "parameters": f"{one['parameters']:,}", "processor seconds": one["processor_seconds"]}
        | {kind: " / ".join(f"{beta:.2f}" for beta in betas.values()) for kind, betas in one["beta"].items()}
        | {"÷ shipped, at 7": " / ".join(f"{b['7'] / first[kind]['7']:.2f}" for kind, b in one["beta"].items())}
        for one in record["arms"]
    ]
    return "\n\n".join([
        "# Arms from a shipped head on",
        f"{machine(about)}, {about['threads']} threads, load {record['load'][0]:.1f} at the end; {settings['steps']} "
        f"steps of {settings['texts_per_step']} texts. β at {' / '.join(map(str, NODES))} draft tokens by kind of "
        f"question. `{about['command']}`, commit {about['commit']}.",
        markdown_table(rows) + "\n",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
