"""Draft heads on disk: a folder with `config.json` and `model.safetensors`, as transformers' users expect.

`config.json`::

    {
      "format_version": 1,
      "algorithm": "ctc",
      "base_model": {"name": "…", "fingerprint": "…"},
      "head": {… the fields of the algorithm's configuration …},
      "training": {… provenance: recipe, data, steps, seed, measured β, versions …}
    }

A head fits one base: its fingerprint is checked before a tensor is read. Weights are safetensors; a pickle is never
opened, since opening one runs code.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.base.causal_lm import BaseModel
from drafter.errors import LoadError, first_line
from drafter.heads.contract import DraftHead, Provenance

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def save_head(head: DraftHead, folder: str | Path) -> None:
    """Write a head's folder; an existing head there is replaced, file by file.

    Raises:
        ValueError: `provenance` is not set.
    """
    if head.provenance is None:
        raise ValueError("a head is saved with its provenance: set head.provenance first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format_version": FORMAT_VERSION,
        "algorithm": head.algorithm,
        "base_model": {"name": head.provenance.base_name, "fingerprint": head.provenance.base_fingerprint},
        "head": dataclasses.asdict(head.config),
        "training": dict(head.provenance.training),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    _replace(folder / WEIGHTS_FILE, lambda file: save_file(tensors, file, metadata={"format": "pt"}))
    _replace(folder / CONFIG_FILE, lambda file: file.write_text(json.dumps(config, indent=2) + "\n"))


def load_head(name_or_path: str | Path, base: BaseModel, algorithms: Mapping[str, type[DraftHead]]) -> DraftHead:
    """Load a draft head, on `base`'s device and in its dtype, in evaluation mode.

    Args:
        name_or_path: A folder, or a hub id (`HF_HUB_OFFLINE` is respected).
        base: The base that it is to draft for.
        algorithms: Head class of each algorithm that may be loaded.

    Raises:
        LoadError: No such head, an unknown algorithm or configuration, damaged, missing or misshapen weights,
            weights as a pickle, or a head of another base. The message names the head and what to do.
    """
    name = str(name_or_path)
    config_file, weights_file = _locate(name)
    config = _read_config(name, config_file)
    algorithm = config["algorithm"]
    if algorithm not in algorithms:
        known = ", ".join(sorted(algorithms))
        raise LoadError(f"draft head {name!r} is of algorithm {algorithm!r}; known here: {known}")
    trained_for = config["base_model"]
    if trained_for["fingerprint"] != base.fingerprint:
        raise LoadError(
            f"draft head {name!r} belongs to the base {trained_for['name']!r} (fingerprint "
            f"{trained_for['fingerprint']}), not to {base.name!r} ({base.fingerprint}): train a head for this base, "
            "or load the other base"
        )
    head_class = algorithms[algorithm]
    head = head_class(build_config(name, head_class.config_class, config["head"]))
    head.provenance = Provenance(trained_for["name"], trained_for["fingerprint"], config.get("training", {}))
    _load_weights(name, head, weights_file)
    return head.to(base.device, base.dtype).eval().requires_grad_(False)


def _replace(target: Path, write: Any) -> None:
    """Write beside `target`, then rename: a reader sees the old file or the new one."""
    temporary = target.with_name(target.name + ".tmp")
    write(temporary)
    temporary.replace(target)


def _locate(name: str) -> tuple[Path, Path]:
    """`config.json` and `model.safetensors` of a folder or a hub id."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise LoadError(f"draft head {name!r} has no {CONFIG_FILE}: give the folder that save_pretrained wrote")
        if not (folder / WEIGHTS_FILE).is_file():
            raise LoadError(f"draft head {name!r} has no {WEIGHTS_FILE}{_pickles(folder)}")
        return folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if folder.exists():
        raise LoadError(f"draft head {name!r} is a file: give the folder that holds it")
    hint = "give a folder with config.json and model.safetensors, or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"no draft head at {name!r}: there is no such folder; {hint}")
    try:
        config_file = hf_hub_download(name, CONFIG_FILE)
    except (OSError, ValueError, RuntimeError, HFValidationError) as error:
        reason = "not in the local cache, and the hub cannot be reached" if _offline(error) else first_line(error)
        raise LoadError(f"no draft head at {name!r}: no such folder, and as a hub id: {reason}; {hint}") from error
    try:
        return Path(config_file), Path(hf_hub_download(name, WEIGHTS_FILE))
    except EntryNotFoundError as error:
        reason = "is not in the local cache, and the hub cannot be reached"
        if not _offline(error):
            reason = "is not there; pickled weights are never loaded"
        raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} {reason}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} cannot be had: {first_line(error)}") from error


def _offline(error: BaseException) -> bool:
    return isinstance(error, LocalEntryNotFoundError)


def _pickles(folder: Path) -> str:
    found = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not found:
        return ""
    return f", only {found[0]}: pickles are never loaded, because loading one runs code; convert it to safetensors"


def _read_config(name: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} cannot be read: {first_line(error)}") from error
    kinds = {"format_version": int, "algorithm": str, "base_model": dict, "head": dict}
    if not isinstance(config, dict) or any(not isinstance(config.get(key), kind) for key, kind in kinds.items()):
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} is not a draft head's (it needs {', '.join(kinds)})")
    if config["format_version"] != FORMAT_VERSION:
        raise LoadError(
            f"draft head {name!r} is of format version {config['format_version']}; this release reads {FORMAT_VERSION}"
        )
    if any(not isinstance(config["base_model"].get(key), str) for key in ("name", "fingerprint")):
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} does not name its base model and fingerprint")
    return config


def build_config(name: str, config_class: type, values: dict[str, Any]) -> Any:
    """An instance of the dataclass `config_class` with `values`, for the head called `name`.

    Raises:
        LoadError: A key is unknown or missing, or its value does not do.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    if unknown := sorted(set(values) - set(fields)):
        raise LoadError(f"draft head {name!r}: unknown configuration key {unknown[0]!r}; made by a later release?")
    required = {key for key, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise LoadError(f"draft head {name!r}: configuration key {missing[0]!r} is missing")
    hints = typing.get_type_hints(config_class)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise LoadError(f"draft head {name!r}: configuration key {key!r} cannot be {value!r}")
    try:
        return config_class(**values)
    except ValueError as error:
        raise LoadError(f"draft head {name!r}: {first_line(error)}") from error


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _load_weights(name: str, head: DraftHead, file: Path) -> None:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"draft head {name!r} has damaged weights: {first_line(error)}") from error
    expected = head.state_dict()
    if missing := sorted(set(expected) - set(tensors)):
        raise LoadError(f"draft head {name!r}: tensor {missing[0]!r} is missing from {WEIGHTS_FILE}")
    if unknown := sorted(set(tensors) - set(expected)):
        raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} has an unknown tensor {unknown[0]!r}")
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            raise LoadError(
                f"draft head {name!r}: tensor {key!r} has shape {list(tensor.shape)}, its configuration says "
                f"{list(expected[key].shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"draft head {name!r}: tensor {key!r} holds values that are not finite")
    head.load_state_dict(tensors)
