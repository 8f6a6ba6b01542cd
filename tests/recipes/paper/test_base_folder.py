"""A base as Vicuna is published becomes a folder that the jobs load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.target_model.loading import load_base
from drafter.text.chat import render_chat
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError
from recipes.paper import base_folder
from recipes.paper.base_folder import prepare_base
from recipes.paper.paper_config import BaseConfig
from recipes.paper.random_vicuna import write_random_vicuna

BASE = BaseConfig("tiny", "random", 2, 32, 86, 2, 2, 2048)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in Vicuna's layout."""
    folder = tmp_path_factory.mktemp("published")
    write_random_vicuna(folder, BASE)
    return folder


@pytest.fixture
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are converted in this process, which is quicker."""
    monkeypatch.setattr(base_folder, "convert_file", lambda file, to: save_file(torch.load(file), to))


@pytest.mark.usefixtures("converted_here")
def test_pickled_shards_become_safetensors_and_the_template_is_vicunas(published: Path, tmp_path: Path) -> None:
    assert not list(published.glob("*.safetensors"))
    base = replace(BASE, source=str(published))
    prepare_base(base, tmp_path / "base")
    assert not list((tmp_path / "base").glob("*.bin"))
    loaded = load_base(tmp_path / "base")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(published.glob("*.bin")):
        weights |= torch.load(file, weights_only=True)
    state = loaded.model.state_dict()
    assert set(state) == set(weights)
    assert all(torch.equal(state[name].half(), weights[name]) for name in weights)
    tokenizer = load_tokenizer(tmp_path / "base")
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    assert render_chat(tokenizer, messages).text == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: Hello! ASSISTANT: Hi.<|end|>USER: Who are you? "
        "ASSISTANT:"
    )
    assert render_chat(tokenizer, [{"role": "system", "content": "Be kind."}, messages[0]]).text == (
        "Be kind. USER: Hello! ASSISTANT:"
    )
    # Another run finds it; one of another base is refused.
    before = (tmp_path / "base" / "base.json").stat().st_mtime_ns
    prepare_base(base, tmp_path / "base")
    assert (tmp_path / "base" / "base.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="holds another base: choose another output"):
        prepare_base(replace(base, name="other"), tmp_path / "base")


@pytest.mark.usefixtures("converted_here")
def test_an_interrupted_conversion_is_begun_again(published: Path, tmp_path: Path) -> None:
    (tmp_path / "base.tmp").mkdir()
    (tmp_path / "base.tmp" / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    prepare_base(replace(BASE, source=str(published)), tmp_path / "base")
    assert load_base(tmp_path / "base").num_layers == BASE.layers
    assert not (tmp_path / "base.tmp").exists()


def test_bases_that_cannot_be_used(published: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"base\.vocabulary of a random base must be 2048"):
        prepare_base(replace(BASE, vocabulary=7), tmp_path / "base")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"has no config\.json that can be read: .*; give another base\.source"):
        prepare_base(replace(BASE, source=str(empty)), tmp_path / "base")
    (empty / "config.json").write_bytes((published / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"has neither \*.safetensors nor pytorch_model\*.bin"):
        prepare_base(replace(BASE, source=str(empty)), tmp_path / "base")
    (empty / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
    with pytest.raises(InputError, match=r"pytorch_model.bin cannot be converted"):
        prepare_base(replace(BASE, source=str(empty)), tmp_path / "base")
    with pytest.raises(InputError, match=r"base\.source nobody/nothing is no folder, and as a hub id"):
        prepare_base(replace(BASE, source="nobody/nothing"), tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.usefixtures("converted_here")
def test_a_base_that_is_not_what_is_said_of_it(published: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"base.width is 64, but the base at .* has 32"):
        prepare_base(replace(BASE, source=str(published), width=64), tmp_path / "base")
    assert not list((tmp_path / "base.tmp").iterdir())  # found before anything is converted
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in published.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    index = json.loads((broken / "pytorch_model.bin.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "pytorch_model-00003-of-00003.bin"
    (broken / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"pytorch_model.bin.index.json cannot be used"):
        prepare_base(replace(BASE, source=str(broken)), tmp_path / "base")
