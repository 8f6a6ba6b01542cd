"""The embedded head's recipe, on a tiny random base: it trains, keeps the best, and resumes where it was cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.base_model import BaseModel
from drafter.drafters.ctc import CTCHead
from drafter.training.simulated_walk import simulated_beta
from drafter.training.targets import RegeneratedText
from recipes.embedded import train_head
from tests.models import random_model


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


def train(base: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = f"--base {base} --data {data} --output {output} --steps 6 --evaluate-every 2 --texts-per-step 3"
    monkeypatch.setattr("sys.argv", ["train_head", *arguments.split()])
    train_head.main()


def test_a_run_cut_off_ends_as_an_unbroken_one(
    base_and_data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = base_and_data
    train(base, data, tmp_path / "unbroken", monkeypatch)

    evaluate, calls = simulated_beta, []

    def cut_off_at_the_third(*args: object, **kwargs: object) -> dict[int, float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(train_head, "simulated_beta", cut_off_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            train(base, data, tmp_path / "broken", monkeypatch)
    train(base, data, tmp_path / "broken", monkeypatch)

    states = [torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("unbroken", "broken")]
    assert [state["step"] for state in states] == [6, 6]
    assert all(torch.equal(tensor, states[1]["head"][name]) for name, tensor in states[0]["head"].items())
    tensors = [load_file(tmp_path / run / "model.safetensors") for run in ("unbroken", "broken")]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())

    head = CTCHead.from_pretrained(tmp_path / "broken", BaseModel.from_pretrained(base))
    assert head.provenance is not None
    history = head.provenance.training["history"]
    # The head that was kept is the last one that was at least as good as all before it.
    best = max(entry["beta"]["16"] for entry in history)
    assert head.provenance.training["validation_beta_simulated"]["16"] == best
    assert head.provenance.training["data"] == {"distill": {"texts": 12, "targets": sum(range(6, 18))}}


def test_a_step_draws_texts_of_like_length_by_seed_and_step_alone() -> None:
    texts = [RegeneratedText([1] * length, 1) for length in range(10, 210)]
    drawn = train_head.batch_texts(texts, step=5, count=4, seed=0)
    assert drawn == train_head.batch_texts(texts, step=5, count=4, seed=0)
    assert drawn != train_head.batch_texts(texts, step=6, count=4, seed=0)
    lengths = [len(text.tokens) for text in drawn]
    assert max(lengths) - min(lengths) <= len(texts) // 20
    assert len(train_head.batch_texts(texts[:2], step=0, count=4, seed=0)) == 2
