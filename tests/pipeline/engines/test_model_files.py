"""What tells models' folders apart, and what shows that weights are not whole."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engines.models import folder_fingerprint, tensor_spans


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    made = tmp_path / "model"
    made.mkdir()
    tensors = {f"layer.{n}": torch.randn(40, 20 + n) for n in range(8)} | {"norm": torch.ones(3)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("sampled", [False, True])
def test_every_tensor_takes_part(folder: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    if sampled:
        monkeypatch.setattr("pipeline.engines.models._WHOLE_BYTES", 100)
        monkeypatch.setattr("pipeline.engines.models._BLOCK", 8)
        monkeypatch.setattr("pipeline.engines.models._EVERY", 1000)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    seen = {folder_fingerprint(folder)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 0.01}, weights, metadata={"format": "pt"})
        seen.add(folder_fingerprint(folder))
    assert len(seen) == 1 + len(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert folder_fingerprint(folder) in seen


def test_where_the_folder_is_and_what_is_not_of_the_model_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = folder_fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "README.md").write_text("more")
    assert folder_fingerprint(copy) == before
    (copy / "modeling.py").write_text("pass")  # code that comes with the weights decides what they mean
    assert folder_fingerprint(copy) != before


def test_chat_templates_in_a_folder_of_their_own_take_part(folder: Path) -> None:
    before = folder_fingerprint(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert folder_fingerprint(folder) != before


def test_a_large_file_that_is_damaged_still_has_a_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engines.models._WHOLE_BYTES", 100)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    before = folder_fingerprint(folder)
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    assert folder_fingerprint(folder) != before


def test_spans_of_tensors_and_weights_cut_anywhere(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    spans = tensor_spans(io.BytesIO(whole), len(whole))
    assert [end - begin for begin, end in spans] == [
        tensor.nbytes for _, tensor in sorted(load_file(folder / "model.safetensors").items())
    ]
    assert spans[-1][1] == len(whole)
    for length in range(0, len(whole), 7):
        with pytest.raises(ValueError, match=r"its header|it has"):
            tensor_spans(io.BytesIO(whole[:length]), length)
    with pytest.raises(ValueError, match="header"):
        tensor_spans(io.BytesIO(bytes(len(whole))), len(whole))
