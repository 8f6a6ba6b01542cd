"""Train the embedded base's CTC draft head on the base's own regenerated continuations.

    python -m recipes.embedded.train_head --base build/base --data build/distilled --output build/heads/ctc

Seeded, and resumes from `OUTPUT/state.pt` when started again with the same arguments. Every `--evaluate-every` steps
β is simulated on held-out greedy texts, and the head with the best β at 16 nodes is the one that is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from drafter.base_model import BaseModel
from drafter.drafters.ctc import CTCHead, CTCHeadConfig
from drafter.pretrained import Provenance
from drafter.training.objectives import draft_loss
from drafter.training.simulated_walk import simulated_beta
from drafter.training.targets import RegeneratedText, draft_batch

CHOSEN_BY = 16
"""Draft nodes of the β that chooses the checkpoint."""


def read_texts(folder: Path) -> dict[str, list[RegeneratedText]]:
    """The distilled texts by part (`validation`, `distill`, `base`, `invented`), those without a target left out."""
    texts: dict[str, list[RegeneratedText]] = {}
    for file in sorted(folder.glob("*-*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            made = [RegeneratedText(row["tokens"], row["prompt_length"]) for row in map(json.loads, lines)]
        texts.setdefault(file.stem.rsplit("-", 1)[0], []).extend(text for text in made if len(text.anchors))
    return texts


def batch_texts(texts: list[RegeneratedText], step: int, count: int, seed: int) -> list[RegeneratedText]:
    """The texts of one step: `count` of like length, drawn by `(seed, step)` alone. `texts` are sorted by length."""
    rng = random.Random(f"{seed}/{step}")
    centre = rng.randrange(len(texts))
    reach = max(count, len(texts) // 20)
    start = min(max(centre - reach // 2, 0), max(len(texts) - reach, 0))
    return rng.sample(texts[start : start + reach], min(count, len(texts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_600)
    parser.add_argument("--texts-per-step", type=int, default=6)
    parser.add_argument("--anchors-per-text", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--label-context", type=int, default=0)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--loss", choices=["prefix", "ctc"], default="prefix")
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--evaluate-texts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    base = BaseModel.from_pretrained(args.base, dtype="float32", device="cpu")
    parts = read_texts(args.data)
    held_out = parts.pop("validation")[: args.evaluate_texts]
    texts = sorted((text for part in parts.values() for text in part), key=lambda text: len(text.tokens))
    data = {part: {"texts": len(made), "targets": sum(len(t.anchors) for t in made)} for part, made in parts.items()}
    print(json.dumps(data), flush=True)

    torch.manual_seed(args.seed)
    config = CTCHeadConfig(
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        num_frames=args.frames,
        depth=args.depth,
        label_context=args.label_context,
        loss=args.loss,
    )
    head = CTCHead(config)
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1.04 + 0.96 * math.cos(math.pi * min(step / args.steps, 1.0)))),
    )
    state_file, first = args.output / "state.pt", 0
    results: list[dict[str, Any]] = []
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, results = state["step"], state["results"]

    started = time.monotonic()
    running = 0.0
    for step in range(first, args.steps):
        chosen = batch_texts(texts, step, args.texts_per_step, args.seed)
        batch = draft_batch(chosen, config.depth, args.anchors_per_text, random.Random(f"{args.seed}/{step}/anchors"))
        loss = draft_loss(head, base, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running = loss.item() if step == first else 0.95 * running + 0.05 * loss.item()
        if (step + 1) % 20 == 0:
            pace = (time.monotonic() - started) / (step + 1 - first)
            print(f"step {step + 1:5d}  loss {running:.3f}  {pace:.2f} s/step", flush=True)
        if (step + 1) % args.evaluate_every and step + 1 != args.steps:
            continue
        beta = simulated_beta(head, base, held_out)
        results.append({"step": step + 1, "loss": running, "beta": {str(n): round(b, 4) for n, b in beta.items()}})
        print(json.dumps(results[-1]), flush=True)
        if results[-1]["beta"][str(CHOSEN_BY)] >= max(result["beta"][str(CHOSEN_BY)] for result in results):
            head.provenance = Provenance(
                base.name,
                base.fingerprint,
                {
                    "recipe": "recipes/embedded/train_head.py",
                    "data": data,
                    "steps": step + 1,
                    "texts_per_step": args.texts_per_step,
                    "anchors_per_text": args.anchors_per_text,
                    "learning_rate": args.learning_rate,
                    "seed": args.seed,
                    "validation_beta_simulated": results[-1]["beta"],
                    "validation_texts": len(held_out),
                    "history": list(results),
                    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                },
            )
            head.save_pretrained(args.output)
        temporary = state_file.with_suffix(".tmp")
        torch.save(
            {
                "step": step + 1,
                "head": head.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "results": results,
            },
            temporary,
        )
        temporary.replace(state_file)


if __name__ == "__main__":
    main()
