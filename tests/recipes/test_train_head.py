"""The recipes of the embedded heads on a tiny random base: they train, keep the best head, and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter.heads.checkpoint import HEADS, load_head, new_head
from drafter.heads.config import head_config
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, simulated_beta
from recipes.embedded import train_head
from recipes.embedded.train_head import HeadRecipe, read_recipes
from tests.support.models import random_model

TRAINING: dict[str, Any] = {"steps": 6, "evaluate_every": 2, "texts_per_step": 3, "learning_rate": 0.02}
RECIPES = {
    "small": HeadRecipe(
        "ctc", {"num_heads": 2, "intermediate_size": 32, "joint_size": 16, "label_context": 1}, TRAINING
    ),
    "soft": HeadRecipe("medusa", {"depth": 3}, {**TRAINING, "teacher": 2, "precision": "bf16"}),
}


@pytest.fixture
def base_and_data(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a random base and of random texts."""
    base, data = tmp_path / "base", tmp_path / "data"
    random_model("llama").save_pretrained(base)
    data.mkdir()
    generator = torch.Generator().manual_seed(0)
    for part, count in (("validation", 3), ("distill", 12)):
        rows = [
            {"tokens": torch.randint(3, 97, (10 + i,), generator=generator).tolist(), "prompt_length": 4}
            for i in range(count)
        ]
        (data / f"{part}-0000.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return base, data


def train(base: Path, data: Path, output: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the command for all of `RECIPES`."""
    arguments = [*RECIPES, "--base", str(base), "--data", str(data), "--output", str(output), "--device", "cpu"]
    patch.setattr("sys.argv", ["train_head", *arguments])
    patch.setattr(train_head, "read_recipes", lambda: RECIPES)
    train_head.main()


def test_an_interrupted_run_ends_like_an_undisturbed_one(
    base_and_data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = base_and_data
    train(base, data, tmp_path / "unbroken", monkeypatch)

    calls = []

    def cut_off(*args: Any, **kwargs: Any) -> dict[int, float]:
        calls.append(1)
        if len(calls) in (3, 6):  # at the last evaluation of the first head, and then at the middle one of the second
            raise KeyboardInterrupt
        return simulated_beta(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(train_head, "simulated_beta", cut_off)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train(base, data, tmp_path / "broken", patch)
    train(base, data, tmp_path / "broken", monkeypatch)

    for name, recipe in RECIPES.items():
        folders = [tmp_path / run / name for run in ("unbroken", "broken")]
        unbroken, broken = (torch.load(folder / "state.pt", weights_only=True) for folder in folders)
        assert unbroken["optimiser"]["steps"] == broken["optimiser"]["steps"] == 6
        assert all(torch.equal(tensor, broken["head"][key]) for key, tensor in unbroken["head"].items())
        kept, again = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(torch.equal(tensor, again[key]) for key, tensor in kept.items())

        head = load_head(folders[1], load_base(base))
        assert head.algorithm == recipe.algorithm
        assert head.provenance is not None
        training = head.provenance.training
        assert training["data"] == {"distill": {"texts": 12, "targets": sum(range(6, 18))}}
        # The saved head is the last one that was at least as good as all heads before it.
        history = [entry for entry in broken["history"] if entry["step"] <= training["history"][-1]["step"]]
        assert training["history"] == history
        scores = [entry["beta"]["16"] for entry in broken["history"]]
        assert history[-1]["beta"]["16"] == max(scores)
        for first, second in zip(unbroken["history"], broken["history"], strict=True):
            assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_every_recipe_can_be_made(tiny_base: BaseModel) -> None:
    for name, recipe in read_recipes().items():
        assert new_head(recipe.algorithm, tiny_base, recipe.head).algorithm == recipe.algorithm, name
        assert TrainingSettings(**recipe.training).steps > 0, name


def test_heads_that_are_compared_learn_alike_and_are_of_about_one_size() -> None:
    compared = {name: recipe for name, recipe in read_recipes().items() if name.startswith("equal-")}
    algorithms = {recipe.algorithm for recipe in compared.values()}
    assert algorithms == set(HEADS)
    sizes = {}
    for name, recipe in compared.items():
        assert recipe.training == compared["equal-ctc"].training, name
        assert recipe.head["depth"] == compared["equal-ctc"].head["depth"], name
        head_class = HEADS[recipe.algorithm]
        embedded = {"hidden_size": 256, "vocab_size": 2048}
        with torch.device("meta"):
            fields = {**head_class.defaults(layers=8), **recipe.head, **embedded}
            head = head_class(head_config(name, head_class.config_class, fields))
        sizes[name] = sum(parameter.numel() for parameter in head.parameters())
    assert max(sizes.values()) <= 1.2 * min(sizes.values()), sizes


def test_a_step_draws_texts_of_like_length_by_seed_and_step_alone() -> None:
    texts = [RegeneratedText([1] * length, 1) for length in range(10, 210)]
    drawn = train_head.batch_texts(texts, step=5, count=4, seed=0)
    assert drawn == train_head.batch_texts(texts, step=5, count=4, seed=0)
    assert drawn != train_head.batch_texts(texts, step=6, count=4, seed=0)
    lengths = [len(text.tokens) for text in drawn]
    assert max(lengths) - min(lengths) <= len(texts) // 20
    assert len(train_head.batch_texts(texts[:2], step=0, count=4, seed=0)) == 2
