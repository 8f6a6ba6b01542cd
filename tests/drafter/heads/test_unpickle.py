""""""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter.errors import LoadError
from drafter.heads import unpickle as module
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


@pytest.mark.slow
def test_what_else_cannot_be_converted(tmp_path: Path) -> None:
    done = unpickle(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} has none of hydra_lm_head.pt, medusa_lm_head.pt, pytorch_model.bin" in done.stderr
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    assert (
        "pytorch_model.bin cannot be converted: ValueError: it holds more than named tensors"
        in unpickle(tmp_path).stderr
    )


_TELL_HOW_IT_LEFT = """
from drafter.heads import unpickle
leave = unpickle._leave_network
unpickle._leave_network = lambda: print(leave(), flush=True)
unpickle.main()
"""


def test_the_process_that_reads_has_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = subprocess.run, []

    def told(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        done = run([command[0], "-c", _TELL_HOW_IT_LEFT, *command[3:]], **settings)
        said.append(done.stdout.strip())
        return done

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(subprocess, "run", told)
    weights = {"0.1.weight": torch.randn(3, 4).t()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    convert(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.1.weight"], weights["0.1.weight"])
    if said == [str(errno.EPERM)]:
        pytest.skip("this system lets nobody leave the network")
    assert said == ["0"]


def test_each_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        with pytest.raises(SystemExit) as ended:
            module.main()
        return str(ended.value)

    monkeypatch.setattr(sys, "argv", ["unpickle", str(tmp_path)])
    torch.save({"0.1.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_SECONDS", 0.01)
        assert reason() == "pytorch_model.bin cannot be converted: it took more than 0.01 seconds"
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refuse)
        assert reason().startswith(f"{tmp_path / 'model.safetensors'} cannot be written: [Errno 13] Permission denied")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    assert reason().startswith(f"{tmp_path / 'model.safetensors'} exists: ")
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
