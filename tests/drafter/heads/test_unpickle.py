""""""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter.errors import LoadError
from drafter.heads.checkpoint import UNPICKLE, load_head
from drafter.heads.unpickle import convert
from drafter.target_model.model import BaseModel


def unpickle(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *UNPICKLE.split()[1:], str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.slow
def test_pickled_weights_become_safetensors_by_the_command_that_the_refusal_names(
    tiny_base: BaseModel, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    weights = {"0.1.weight": torch.randn(3, 4).t(), "d2t": torch.arange(3)}
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(LoadError, match=f"only medusa_lm_head.pt: .*`{UNPICKLE} {tmp_path}` converts it"):
        load_head(tmp_path, tiny_base)
    done = unpickle(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'model.safetensors'}\n"), done.stderr
    made = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(made[name], one) for name, one in weights.items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "medusa_lm_head.pt", "model.safetensors"]


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    torch.save({"0.1.weight": Evil(tmp_path / "made")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be converted: "):
        convert(folder)
    assert not (tmp_path / "made").exists()
    assert [file.name for file in folder.iterdir()] == ["pytorch_model.bin"]


def test_what_else_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has none of hydra_lm_head\.pt, medusa_lm_head\.pt, pytorch_model\.bin"):
        convert(tmp_path)
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be converted: it holds more than named tensors"):
        convert(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"model\.safetensors exists"):
        convert(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
