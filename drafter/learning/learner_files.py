"""A learner's state on disk: one file of tensors, whose header holds all else, so that it is whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.errors import LoadError, first_line

STATE_FILE = "learner.safetensors"
_FACTS = "learner"


def write_learner(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a state; one that was there is replaced at once.

    Args:
        folder: Is made if there is none.
        tensors: On the CPU, by name.
        facts: Anything that JSON can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{STATE_FILE}.tmp"
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, temporary, metadata={_FACTS: json.dumps(dict(facts))})
    temporary.replace(folder / STATE_FILE)


def read_learner(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a state.

    Raises:
        LoadError: There is none, or it is damaged.
    """
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as error:
        raise LoadError(f"no learner's state in {folder}: it has no {STATE_FILE}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"the learner's state in {folder} is damaged: {first_line(error)}") from error
