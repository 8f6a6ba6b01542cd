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
from typing import Any, Literal

import pyarrow.dataset
import torch
from torch import Tensor

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
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.text.tokenizers import load_tokenizer
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, anchor_draws, count_targets, draft_batch, simulated_beta

TABLE_FILE = "table.md"
_FILES = {kind: KINDS[kind] or "" for kind in ("arithmetic", "chat")}
_HELD_OUT = 6
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
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6], help="exits of the networks")
    parser.add_argument("--texts", type=int, default=240, help="answers that heads learn from")
    parser.add_argument("--seconds", type=float, default=100.0, help="training time of each head")
    parser.add_argument("--draft-tokens", nargs="+", default=["3", "auto"])
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    names = train_all(base, args.answers, args.texts, args.heads, args.layers, args.seconds)
    drafters = (*(f"exit:{layers}" for layers in args.layers), *map(str, names))
    counts: tuple[int | Literal["auto"], ...]
    counts = tuple("auto" if one == "auto" else int(one) for one in args.draft_tokens)
    plan = Plan(drafters, ("exact",), counts, (1,), max_new_tokens=args.max_new_tokens)
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


def train_all(
    base: BaseModel, texts: Path, count: int, folder: Path, layers: Sequence[int], seconds: float
) -> list[Path]:
    """Train the heads that are not in `folder`, each for so many seconds. Return the folders of all."""
    sizes: dict[str, Any] = {"depth": 4, "draft_vocab_size": _VOCABULARY}
    kinds = {f"imitation-{one}": ("imitation", {**sizes, "layers": one}) for one in layers}
    kinds["ctc"] = ("ctc", {**sizes, **_CTC})
    left = {name: kind for name, kind in kinds.items() if not (folder / name / CONFIG_FILE).exists()}
    if left:
        learned = answers(texts, count + _HELD_OUT)
        states = read(base, learned, (*(one - 1 for one in layers), LM_HEAD_INPUT))
        for name, (algorithm, settings) in left.items():
            train_for(seconds, algorithm, settings, base, learned, states, folder / name)
    return [folder / name for name in kinds]


def answers(folder: Path, count: int) -> list[RegeneratedText]:
    """Return texts of a distillation, spread evenly, cut to what heads learn from."""
    table = pyarrow.dataset.dataset(folder / "data").to_table(["prompt_token_ids", "token_ids"])
    pairs = zip(table["prompt_token_ids"].to_pylist(), table["token_ids"].to_pylist(), strict=True)
    texts = [RegeneratedText([*prompt, *answer][:_LONGEST], len(prompt)) for prompt, answer in pairs]
    texts = [text for text in texts if len(text.anchors) > 1]
    return [texts[place * len(texts) // count] for place in range(min(count, len(texts)))]


@torch.inference_mode()
def read(base: BaseModel, texts: Sequence[RegeneratedText], layers: tuple[int, ...]) -> dict[int, list[Tensor]]:
    """Return the texts' hidden states, `[L, d]` of each, by layer."""
    cache, found = base.new_cache(1, _LONGEST), dict[int, list[Tensor]]()
    for text in texts:
        hidden = base.prefill(cache, 0, [torch.tensor(text.tokens, device=base.device)], hidden_layers=layers)
        for layer, states in zip(layers, hidden.chunk(len(layers), -1), strict=True):
            found.setdefault(layer, []).append(states.clone())
    return found


def train_for(
    seconds: float,
    algorithm: str,
    settings: dict[str, Any],
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    states: dict[int, list[Tensor]],
    folder: Path,
) -> None:
    """Train a head for about so long, in as many steps as the first ones say, and save it with what it took."""
    counts = count_targets(texts[:-_HELD_OUT], base.vocab_size)
    layers = new_head(algorithm, base, settings, counts).hidden_layers
    hidden = [torch.cat(some, -1) for some in zip(*(states[layer] for layer in layers), strict=True)]
    texts = [replace(text, hidden=one) for text, one in zip(texts, hidden, strict=True)]
    learned, held_out = texts[:-_HELD_OUT], texts[-_HELD_OUT:]

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
