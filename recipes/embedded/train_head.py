"""Train draft heads for the embedded base on the base's own continuations.

    python -m recipes.embedded.train_head ctc medusa --data build/distilled --output build/heads

`heads.yaml` names the heads, each with its algorithm, its configuration and the settings of its training. Every head
sees the same texts in the same order. A run is seeded. Started again, it resumes from `OUTPUT/HEAD/state.pt`. Every
`evaluate_every` steps β is simulated on held-out greedy texts, and the head with the best β is saved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch.nn.utils.rnn import pad_sequence

from drafter.embedded import EMBEDDED_BASE
from drafter.heads.checkpoint import new_head, save_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.losses import DraftBatch
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.loop import TorchOptimiser, TrainingStep, train, training_layers
from drafter.training.settings import TrainingSettings
from drafter.training.targets import (
    RegeneratedText,
    anchor_draws,
    base_hidden_states,
    count_targets,
    draft_batch,
    simulated_beta,
)

HEADS = Path(__file__).with_name("heads.yaml")
HELD_OUT = 60
"""Number of validation texts that β is simulated on."""


@dataclass(frozen=True)
class HeadRecipe:
    """How one head is trained.

    Args:
        algorithm: The head's algorithm.
        head: Fields of its configuration.
        training: Fields of `TrainingSettings`.
        parts: Parts of the distilled data to learn from; None for all.
    """

    algorithm: str
    head: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    parts: list[str] | None = None


def read_recipes(file: Path = HEADS) -> dict[str, HeadRecipe]:
    """Read the recipes of `heads.yaml` by head."""
    return {name: HeadRecipe(**recipe) for name, recipe in yaml.safe_load(file.read_text(encoding="utf-8")).items()}


def read_texts(folder: Path) -> dict[str, list[RegeneratedText]]:
    """Read the distilled texts by part (`validation`, `distill`, `base`, `invented`), except those without targets."""
    texts: dict[str, list[RegeneratedText]] = {}
    for file in sorted(folder.glob("*-*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            made = [RegeneratedText(row["tokens"], row["prompt_length"]) for row in map(json.loads, lines)]
        texts.setdefault(file.stem.rsplit("-", 1)[0], []).extend(text for text in made if len(text.anchors))
    return texts


def with_hidden_states(
    base: BaseModel, texts: list[RegeneratedText], folder: Path, layers: tuple[int, ...] = (LM_HEAD_INPUT,)
) -> list[RegeneratedText]:
    """Return texts with the base's hidden states, which are stored in `folder` in bf16 for the heads that follow.

    Args:
        base: The base.
        texts: The texts, sorted by length.
        folder: Holds a file of hidden states for each set of texts and layers.
        layers: Which hidden states; see `training_layers`.
    """
    digest = zlib.crc32(repr([layers, *(list(text.tokens) for text in texts)]).encode())
    file = folder / f"hidden-{base.fingerprint}-{digest:08x}.bf16"
    starts = [0, *itertools.accumulate(len(text.tokens) for text in texts)]
    width = base.hidden_size * len(layers)
    size = starts[-1] * width * 2
    if not file.exists() or file.stat().st_size != size:
        print(f"hidden states of {starts[-1]:,} tokens: {size / 2**20:,.0f} MiB in {file}", flush=True)
        with file.with_suffix(".tmp").open("wb") as output:
            for group in (texts[first : first + 16] for first in range(0, len(texts), 16)):
                tokens = pad_sequence([torch.as_tensor(text.tokens) for text in group], batch_first=True)
                with torch.autocast(base.device.type, torch.bfloat16):
                    hidden = base_hidden_states(base, tokens.to(base.device), layers).to("cpu", torch.bfloat16)
                for text, states in zip(group, hidden, strict=True):
                    output.write(states[: len(text.tokens)].contiguous().view(torch.uint8).numpy().tobytes())
        file.with_suffix(".tmp").replace(file)
    states = torch.from_file(str(file), size=size // 2, dtype=torch.bfloat16).view(-1, width)
    return [
        replace(text, hidden=states[start:stop])
        for text, (start, stop) in zip(texts, itertools.pairwise(starts), strict=True)
    ]


def batch_texts(texts: list[RegeneratedText], step: int, count: int, seed: int) -> list[RegeneratedText]:
    """Return the texts of one step, drawn by `(seed, step)` alone.

    Args:
        texts: All texts, sorted by length.
        step: Number of the step.
        count: Number of texts, which are of similar length.
        seed: Seed of the run.
    """
    rng = random.Random(f"{seed}/{step}")
    centre = rng.randrange(len(texts))
    reach = max(count, len(texts) // 20)
    start = min(max(centre - reach // 2, 0), max(len(texts) - reach, 0))
    return rng.sample(texts[start : start + reach], min(count, len(texts)))


def train_head(
    name: str, recipe: HeadRecipe, base: BaseModel, data: dict[str, list[RegeneratedText]], output: Path
) -> None:
    """Train one head in `output/name`, from its last state if there is one."""
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    settings = TrainingSettings(**recipe.training)
    held_out = data["validation"][:HELD_OUT]
    parts = {part: data[part] for part in recipe.parts or sorted(set(data) - {"validation"})}
    texts = sorted((text for part in parts.values() for text in part), key=lambda text: len(text.tokens))
    torch.manual_seed(settings.seed)
    head = new_head(recipe.algorithm, base, recipe.head, count_targets(texts, base.vocab_size))
    texts = with_hidden_states(base, texts, output, training_layers(head, settings))
    print(f"{name}: {sum(p.numel() for p in head.parameters()):,} parameters, {len(texts):,} texts", flush=True)
    optimiser = TorchOptimiser(TrainingStep(base, head, settings), settings)
    history: list[dict[str, Any]] = []
    state_file, seconds = folder / "state.pt", 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        head.load_state_dict(state["head"])
        optimiser.load_state_dict(state["optimiser"])
        history, seconds = state["history"], state["seconds"]

    def steps() -> Iterator[list[DraftBatch]]:
        for step in itertools.count(optimiser.steps):
            chosen = batch_texts(texts, step, settings.texts_per_step, settings.seed)
            draws = anchor_draws(settings.seed, step, range(len(chosen)))
            yield [draft_batch(chosen, head.config.depth, settings.anchors_per_text, draws).to(base.device)]

    def evaluate() -> dict[int, float]:
        return simulated_beta(head, base, held_out)

    def provenance() -> Provenance:
        counts = {p: {"texts": len(made), "targets": sum(len(t.anchors) for t in made)} for p, made in parts.items()}
        return Provenance(
            base.name,
            base.fingerprint,
            {
                "recipe": f"recipes/embedded/train_head.py {name}",
                "data": counts,
                "settings": asdict(settings),
                "validation_texts": len(held_out),
                "history": history,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            },
        )

    losses: list[float] = []
    started = time.monotonic() - seconds
    for done in train(optimiser, steps(), settings, evaluate, optimiser.steps):
        losses.append(done.update.loss)
        if done.beta is None:
            continue
        seconds = time.monotonic() - started
        beta = {str(nodes): round(value, 4) for nodes, value in done.beta.items()}
        loss, losses = round(sum(losses) / len(losses), 4), []
        history.append({"step": done.step, "loss": loss, "seconds": round(seconds), "beta": beta})
        print(name, json.dumps(history[-1]), flush=True)
        _keep_best(head, history, settings.chosen_by, folder, provenance())
        state = {"head": head.state_dict(), "optimiser": optimiser.state_dict(), "history": history, "seconds": seconds}
        torch.save(state, temporary := state_file.with_suffix(".tmp"))
        temporary.replace(state_file)


def _keep_best(
    head: DraftHead, history: list[dict[str, Any]], nodes: int, folder: Path, provenance: Provenance
) -> None:
    """Save the head if its β is the best so far."""
    scores = [entry["beta"][str(nodes)] for entry in history]
    if scores[-1] >= max(scores):
        head.provenance = provenance
        save_head(head, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipes = read_recipes()
    parser.add_argument("heads", nargs="+", choices=recipes, metavar="HEAD", help="names in heads.yaml")
    parser.add_argument("--base", type=Path, default=EMBEDDED_BASE)
    parser.add_argument("--data", type=Path, default=Path("build/distilled"))
    parser.add_argument("--output", type=Path, default=Path("build/heads"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    base = load_base(args.base, dtype="float32", device=args.device)
    data = read_texts(args.data)
    for name in args.heads:
        train_head(name, recipes[name], base, data, args.output)


if __name__ == "__main__":
    main()
