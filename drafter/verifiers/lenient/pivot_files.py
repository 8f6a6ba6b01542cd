"""A classifier of `pad` on disk: a folder with `config.json` and `model.safetensors`.

`config.json`::

    {
      "format_version": 1,
      "verifier": "pad",
      "base_model": {"name": "…", "fingerprint": "…"},
      "hidden_size": 576,
      "layer": 22,
      "training": {… provenance: labels, scorer, measured ROC, versions …}
    }
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.errors import LoadError, first_line
from drafter.verifiers.lenient.pivot_classifier import PivotClassifier

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_FORMAT = 1
_KIND = "pad"


@dataclass(frozen=True)
class BaseOfClassifier:
    """The base whose hidden states a classifier knows.

    Args:
        name: Hub id or folder.
        fingerprint: See `drafter.base.fingerprint`.
    """

    name: str
    fingerprint: str


def save_classifier(
    classifier: PivotClassifier, base: BaseOfClassifier, training: Mapping[str, Any], folder: Path
) -> None:
    """Write a classifier's folder; the configuration comes last, so that a folder that has it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in classifier.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {
        "format_version": _FORMAT,
        "verifier": _KIND,
        "base_model": {"name": base.name, "fingerprint": base.fingerprint},
        "hidden_size": classifier.hidden_size,
        "layer": classifier.layer,
        "training": dict(training),
    }
    partial = folder / f"{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / CONFIG_FILE)


def load_classifier(name: str | Path) -> tuple[PivotClassifier, BaseOfClassifier]:
    """Read a classifier's folder, and which base it was made for.

    Raises:
        LoadError: There is none, or it is damaged.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise LoadError(
            f"classifier {str(name)!r} is not a folder with {CONFIG_FILE} and {WEIGHTS_FILE}: make one with "
            "python -m jobs.pivots"
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if (config["format_version"], config["verifier"]) != (_FORMAT, _KIND):
            raise LoadError(f"classifier {str(name)!r} is not one of python -m jobs.pivots of this release")
        base = BaseOfClassifier(str(config["base_model"]["name"]), str(config["base_model"]["fingerprint"]))
        with torch.device("cpu"):
            classifier = PivotClassifier(int(config["hidden_size"]), int(config["layer"]))
        classifier.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except LoadError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise LoadError(
            f"classifier {str(name)!r} is damaged: {why}: make it again with python -m jobs.pivots"
        ) from error
    return classifier.eval().requires_grad_(False), base
