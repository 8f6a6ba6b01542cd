"""The stages after the rounds: which jobs are run, on what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.embedded import EMBEDDED_BASE
from drafter.heads.checkpoint import is_head_of, new_head, save_head
from drafter.heads.contract import Provenance
from drafter.target_model.loading import load_base
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.training.config import TrainConfig
from recipes.smollm2 import head
from recipes.smollm2.__main__ import main
from recipes.smollm2.fetch import NAME
from recipes.smollm2.rounds import Round


def test_the_head_learns_from_the_rounds_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainConfig] = []
    monkeypatch.setattr(head, "run_training", asked.append)
    for number in (1, 2, 3):
        Round(number, tmp_path).answers.mkdir(parents=True)
    head.train(Path("base"), tmp_path, 2, ["--training.steps", "7"])
    (config,) = asked
    assert config.folders == [str(Round(number, tmp_path).answers) for number in (1, 2)]
    assert (config.model, config.output) == ("base", str(tmp_path / "training-2"))
    assert (config.start, config.head, config.training.steps) == (str(head.SHIPPED.relative_to(Path.cwd())), {}, 7)


def test_a_round_without_answers_is_named(tmp_path: Path) -> None:
    Round(1, tmp_path).answers.mkdir(parents=True)
    with pytest.raises(InputError, match="round-02/answers: run the stage distil first"):
        head.train(Path("base"), tmp_path, 2, [])


def test_the_head_that_was_trained_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[EvaluateConfig, str]] = []
    monkeypatch.setattr(head, "run_evaluation", lambda config, command: asked.append((config, command)))
    with pytest.raises(InputError, match="run the stage train first"):
        head.evaluate(Path("base"), tmp_path, 2, [])
    trained = tmp_path / "training-2" / "head"
    trained.mkdir(parents=True)
    head.evaluate(Path("base"), tmp_path, 2, [])
    ((config, command),) = asked
    assert (config.model, config.drafter, config.output) == ("base", str(trained), str(tmp_path / "evaluation-2"))
    assert sorted(config.files) == ["chat", "code", "gsm8k", "records", "rewriting"]
    assert command.startswith("drafter evaluate --config ")


def test_the_head_that_was_trained_is_shipped_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(EMBEDDED_BASE, device="cpu")
    trained = new_head("ctc", base, {"num_layers": 1})
    trained.provenance = Provenance(str(EMBEDDED_BASE), base.fingerprint, {"steps": 3})
    save_head(trained, tmp_path / "training-2" / "head")
    monkeypatch.setattr(head, "SHIPPED", tmp_path / "shipped")
    head.ship(EMBEDDED_BASE, tmp_path, 2)
    config = json.loads((tmp_path / "shipped" / "config.json").read_text())
    assert config["base_model"] == {"name": NAME, "fingerprint": base.fingerprint}
    assert config["training"] == {"steps": 3}
    tensors = load_file(tmp_path / "shipped" / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name + ".scale" in tensors} == {torch.int8}
    assert is_head_of(tmp_path / "shipped", base)


def test_settings_go_to_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distil", "train", "--model", str(tmp_path), "--", "--training.steps", "7"]) == 2
    assert "name one stage beside fetch" in capsys.readouterr().err
