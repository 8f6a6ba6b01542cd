"""An imitation network beside the plain exit, a CTC head and plain decoding, after equal time of training.

    drafter distill --input PROMPTS --output build/answers --model MODEL --drafter none
    python -m benchmarks.imitation --model MODEL --answers build/answers --output benchmarks/results/imitation

The heads learn from the same answers, each for as many seconds, and are measured on questions that are not among them.
A network of each number of layers is trained, so that the record says which one pays. Trained heads are kept under
`--heads`, and a run that was interrupted does not train them again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch

from benchmarks.never_slower import DATA, KINDS
from drafter.devices import in_passing_thread
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import RESULTS_FILE, Plan
from drafter.evaluation.tables import page
from drafter.heads.checkpoint import new_head, save_head
from drafter.heads.config import CONFIG_FILE
from drafter.heads.contract import DraftHead, Provenance
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, anchor_draws, count_targets, draft_batch, simulated_beta

TABLE_FILE = "table.md"
_FILES = {kind: KINDS[kind] or "" for kind in ("arithmetic", "chat")}
_HELD_OUT = 12
"""Answers on which the acceptance length that goes into a head's file is simulated."""
_LONGEST = 256
"""Tokens of a text that heads learn from."""
_SETTINGS = TrainingSettings(texts_per_step=6, anchors_per_text=48, warmup_steps=20, precision="bf16")
_VOCABULARY = 8192
_CTC = {"num_frames": 5, "label_context": 2, "joint_size": 256, "joint_layers": 2, "num_heads": 9}
"""The layout of the head that ships for SmolLM2, of less depth."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not trained yet, measure, and write `results.json` and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="output of `drafter distill`")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RESULTS_FILE} and {TABLE_FILE}")
    parser.add_argument("--heads", type=Path, default=Path("build/imitation-heads"), help="folder for the heads")
    parser.add_argument("--model", required=True, help="target model")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6, 10], help="exits of the networks")
    parser.add_argument("--seconds", type=float, default=100.0, help="training time of each head")
    parser.add_argument("--draft-tokens", nargs="+", default=["2", "4", "auto"])
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    names = train_all(base, args.answers, args.heads, args.layers, args.seconds)
    drafters = (*(f"exit:{layers}" for layers in args.layers), *map(str, names))
    counts = tuple("auto" if one == "auto" else int(one) for one in args.draft_tokens)
    plan = Plan(drafters, ("exact",), counts, (1,), max_new_tokens=args.max_new_tokens, transformers=False)
    questions = {
        kind: [replace(one, turns=one.turns[:1]) for one in read_questions(DATA / file, args.prompts)]
        for kind, file in _FILES.items()
    }
    evaluation = Evaluation(base, tokenizer, questions, plan)
    results = evaluation.describe(shlex.join(["python", "-m", "benchmarks.imitation", *given]), _FILES)
    for cells in evaluation.run():
        if not isinstance(cells, Progress):
            results.cells.extend(cells)
            results.save(args.output)
            (args.output / TABLE_FILE).write_text(page(results), encoding="utf-8")


def train_all(base: BaseModel, texts: Path, folder: Path, layers: Sequence[int], seconds: float) -> list[Path]:
    """Train the heads that are not in `folder`, each for so many seconds. Return the folders of all."""
    sizes: dict[str, Any] = {"depth": 4, "draft_vocab_size": _VOCABULARY}
    kinds = {f"imitation-{count}": ("imitation", {**sizes, "layers": count}) for count in layers}
    kinds["ctc"] = ("ctc", {**sizes, **_CTC})
    for name, (algorithm, settings) in kinds.items():
        if not (folder / name / CONFIG_FILE).exists():
            train_for(seconds, algorithm, settings, base, answers(texts), folder / name)
    return [folder / name for name in kinds]


def answers(folder: Path) -> list[RegeneratedText]:
    """Return the texts of a distillation, cut to what heads learn from."""
    table = pyarrow.dataset.dataset(folder / "data").to_table(["prompt_token_ids", "token_ids"])
    pairs = zip(table["prompt_token_ids"].to_pylist(), table["token_ids"].to_pylist(), strict=True)
    texts = [RegeneratedText([*prompt, *answer][:_LONGEST], len(prompt)) for prompt, answer in pairs]
    return [text for text in texts if len(text.anchors) > 1]


def train_for(
    seconds: float,
    algorithm: str,
    settings: dict[str, Any],
    base: BaseModel,
    texts: list[RegeneratedText],
    folder: Path,
) -> None:
    """Train a head for about so long, in as many steps as the first ones say, and save it with what it took."""
    learned, held_out = texts[:-_HELD_OUT], texts[-_HELD_OUT:]
    counts = count_targets(learned, base.vocab_size)

    def trained(steps: int) -> tuple[DraftHead, float, list[float]]:
        torch.manual_seed(0)
        head, order = new_head(algorithm, base, settings, counts), torch.Generator().manual_seed(0)
        schedule = replace(_SETTINGS, steps=steps)
        optimiser, begin, losses = TorchOptimiser(TrainingStep(base, head, schedule), schedule), time.perf_counter(), []
        for step in range(steps):
            places = torch.randint(len(learned), (_SETTINGS.texts_per_step,), generator=order).tolist()
            draws = anchor_draws(0, step, range(len(places)))
            some = [learned[place] for place in places]
            batch = draft_batch(some, head.config.depth, _SETTINGS.anchors_per_text, draws)
            losses.append(optimiser.update([batch.to(base.device)]).loss)
        return head.eval().requires_grad_(False), time.perf_counter() - begin, losses

    tried = 4
    _, took, _ = trained(tried)
    head, took, losses = trained(max(tried, round(seconds * tried / took)))
    beta = simulated_beta(head, base, held_out, (2, 4, 8))
    print(f"{folder.name}: {len(losses)} steps in {took:.0f} s, loss {losses[-1]:.2f}, {beta}", flush=True)
    record = {"texts": len(learned), "steps": len(losses), "seconds": round(took, 1), "loss": round(losses[-1], 3)}
    history = [{"step": len(losses), "beta": {str(nodes): value for nodes, value in beta.items()}}]
    head.provenance = Provenance(base.name, base.fingerprint, {**record, "history": history})
    save_head(head, folder)


if __name__ == "__main__":
    main()
