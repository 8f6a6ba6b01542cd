"""Draft heads by algorithm: new ones, and those saved in a folder or on the hub; export to layouts of others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.ctc.head import CTCHead
from drafter.drafters.target import Target
from drafter.errors import LoadError, first_line
from drafter.heads.config import CONFIG_FILE, WEIGHTS_FILE, head_config, write_whole
from drafter.heads.contract import DraftHead, Provenance, most_frequent
from drafter.heads.packed import pack, unpack
from drafter.heads.published import Json, Layout, TargetOfExport, Weights, public_config, read_public, refuse_other_base
from drafter.hub import hub_file, not_found
from drafter.json_fields import FieldError, from_json
from drafter.plugins import resolved
from drafter.target_model.weights import AtMost

HEADS: dict[str, type[DraftHead]] = {CTCHead.algorithm: CTCHead, **resolved("heads")}
"""Draft heads by the name of their algorithm."""
UNPICKLE = "python -m drafter.heads.unpickle"
"""Converts pickled weights in a restricted process."""
_PUBLISHED_WEIGHTS = (WEIGHTS_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_FORMAT_VERSION = 1
_REALS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
"""Accepted dtypes in a file; they are converted to the head's."""


def new_head(
    algorithm: str, base: Target, settings: Mapping[str, Any], token_counts: Tensor | None = None
) -> DraftHead:
    """Return an untrained head on the target model's device, in float32.

    Args:
        algorithm: A key of `HEADS`.
        settings: Fields of its configuration, without `hidden_size` and `vocab_size`.
        token_counts: `[V]` token frequencies in the training texts, which choose the draft vocabulary.

    Raises:
        LoadError: The algorithm or a field is unknown, or a value is invalid.
        ValueError: There is a `draft_vocab_size`, but no `token_counts`.
    """
    if algorithm not in HEADS:
        raise LoadError(f"no draft head {algorithm!r}: known are {', '.join(HEADS)}")
    sizes = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    head_class = HEADS[algorithm]
    fields = {**head_class.defaults(base.num_layers), **settings, **sizes}
    head = head_class(head_config(algorithm, head_class.config_class, fields))
    _refuse_missing_layer(algorithm, head, base)
    head.to(base.device)
    if head.vocabulary is not None:
        if token_counts is None:
            raise ValueError("a draft vocabulary is chosen by how often tokens occur: give token_counts")
        head.vocabulary.tokens.copy_(most_frequent(token_counts, len(head.vocabulary.tokens)))
        head.vocabulary.borrow(base)
    head.start_from(base)
    return head


def save_head(head: DraftHead, folder: str | Path, *, packed: bool = False) -> None:
    """Write a head's folder, replacing the files of an earlier head; raise `ValueError` without `provenance`.

    Args:
        packed: One byte a weight, rounded: see `drafter.heads.packed`.
    """
    if head.provenance is None:
        raise ValueError("a head is saved with its provenance: set head.provenance first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    origin = head.provenance
    base, shape = _BaseOfHead(origin.base_name, origin.base_fingerprint), dataclasses.asdict(head.config)
    config = _HeadFile(_FORMAT_VERSION, head.algorithm, base, shape, dict(origin.training))
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    stored = pack(tensors) if packed else tensors
    write_whole(folder / WEIGHTS_FILE, lambda file: save_file(stored, file, metadata={"format": "pt"}))
    write_whole(folder / CONFIG_FILE, lambda file: file.write_text(text))


def export_head(source: Path, target: Path, base: TargetOfExport) -> None:
    """Convert a folder that `save_head` has written to the layout that vLLM reads, in an existing folder.

    It raises what `exportable` does.
    """
    saved = json.loads((source / CONFIG_FILE).read_bytes())
    layout, shape = exportable(saved["algorithm"], saved["head"])
    assert layout.export is not None
    config, tensors = layout.export(shape, unpack(load_file(source / WEIGHTS_FILE)), base)
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / WEIGHTS_FILE, {"format": "pt"})
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def exportable(algorithm: str, fields: Mapping[str, Any]) -> tuple[Layout, Any]:
    """Return a head's export layout and its configuration; raise `LoadError` if the head cannot be exported."""
    exported: dict[str, Layout] = {one.algorithm: one for one in resolved("layouts").values() if one.export is not None}
    if algorithm not in exported:
        raise LoadError(f"heads of algorithm {algorithm!r} have no layout that others read; {', '.join(exported)} have")
    shape = head_config(algorithm, HEADS[algorithm].config_class, fields)
    exported[algorithm].check_exportable(shape)
    return exported[algorithm], shape


def load_head(name_or_path: str | Path, base: Target) -> DraftHead:
    """Load a draft head from a folder or hub id in evaluation mode, on the target model's device and in its dtype.

    Raises:
        LoadError: The head does not exist, its algorithm or configuration is unknown, its weights are damaged, missing,
            misshapen or pickled, or it belongs to another target model. The message names the head and what to do.
    """
    head = _read_head(str(name_or_path), base)
    head.to(base.device, base.dtype).eval().requires_grad_(False)
    _borrow(str(name_or_path), head, base)
    return head


def head_to_train(name_or_path: str | Path, base: Target) -> DraftHead:
    """Load a draft head to train it further, in float32; raise what `load_head` does."""
    head = _read_head(str(name_or_path), base)
    head.to(base.device)
    _borrow(str(name_or_path), head, base)
    return head


def _read_head(name: str, base: Target) -> DraftHead:
    config_file, weights_file = _find_files(name)
    if (public := public_config(config_file)) is not None:
        head, tensors = _published(name, public, _read_weights(name, weights_file), base)
    else:
        head, tensors = _own(name, _read_config(name, config_file), weights_file, base)
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"draft head {name!r}: tensor {key!r} holds values that are not finite")
    head.load_state_dict(tensors)
    return head


def _borrow(name: str, head: DraftHead, base: Target) -> None:
    if head.vocabulary is not None:
        try:
            head.vocabulary.borrow(base)
        except ValueError as error:
            raise LoadError(f"draft head {name!r}: {error}") from error


def saved_shape(name: str) -> tuple[str, dict[str, Any]]:
    """Return algorithm and configuration of a saved head.

    Raises `LoadError` if the folder or hub id does not exist or is not of this format.
    """
    config = _read_config(name, _find_files(name)[0])
    return config.algorithm, config.head


def is_head_of(name_or_path: str | Path, base: Target) -> bool:
    """Return whether a draft head was trained for this target model; raise `LoadError` if it cannot be read."""
    name = str(name_or_path)
    return _read_config(name, _find_files(name)[0]).base_model.fingerprint in base.fingerprints


# Files.


def _find_files(name: str) -> tuple[Path, Path]:
    """Return the paths of configuration and weights in a folder or of a hub id (`HF_HUB_OFFLINE` is respected)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise LoadError(f"draft head {name!r} has no {CONFIG_FILE}: give a folder that a draft head was saved in")
        weights = next((folder / one for one in _PUBLISHED_WEIGHTS if (folder / one).is_file()), None)
        if weights is None:
            raise LoadError(f"draft head {name!r} has no {WEIGHTS_FILE}{_only_pickles(folder)}")
        return folder / CONFIG_FILE, weights
    if folder.exists():
        raise LoadError(f"draft head {name!r} is a file: give the folder that holds it")
    hint = f"give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"no draft head at {name!r}: there is no such folder; {hint}")
    return _on_hub(name, hint)


def _only_pickles(folder: Path) -> str:
    found = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not found:
        return ""
    return (
        f", only {found[0]}: pickles are never loaded, because loading one runs code; `{UNPICKLE} {folder}` converts it"
    )


def _on_hub(name: str, hint: str) -> tuple[Path, Path]:
    try:
        config_file = hub_file(name, CONFIG_FILE)
    except (OSError, ValueError, RuntimeError, HFValidationError) as error:
        raise LoadError(
            f"no draft head at {name!r}: no such folder, and as a hub id: {not_found(error)}; {hint}"
        ) from error
    for weights in _PUBLISHED_WEIGHTS:
        try:
            return config_file, hub_file(name, weights)
        except EntryNotFoundError as error:
            missing: Exception = error
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"draft head {name!r}: {weights} cannot be downloaded: {first_line(error)}") from error
    reason = f"is not there; pickled weights are never loaded: `hf download {name}`, then `{UNPICKLE} FOLDER`"
    if isinstance(missing, LocalEntryNotFoundError):
        reason = "is not in the local cache, and the hub cannot be reached"
    raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} {reason}") from missing


@dataclass(frozen=True)
class _BaseOfHead:
    name: str
    fingerprint: str


@dataclass(frozen=True)
class _HeadFile:
    """Contents of `config.json`."""

    format_version: int
    algorithm: str
    base_model: _BaseOfHead
    head: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)


def _read_config(name: str, file: Path) -> _HeadFile:
    try:
        config: _HeadFile = from_json(_HeadFile, json.loads(file.read_bytes()), others=True)
    except FieldError as error:
        needed = ", ".join(one.name for one in dataclasses.fields(_HeadFile))
        reason = f"is not a draft head's (which has {needed})"
        if error.path[0:1] == ("base_model",) and len(error.path) > 1:
            reason = "does not name its target model and fingerprint"
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} {reason}") from error
    except (OSError, RecursionError, ValueError) as error:
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} cannot be read: {first_line(error)}") from error
    if config.format_version != _FORMAT_VERSION:
        raise LoadError(
            f"draft head {name!r} is of format version {config.format_version}; this release reads {_FORMAT_VERSION}"
        )
    return config


def _read_weights(name: str, file: Path) -> Weights:
    try:
        return unpack(load_file(file))
    except (OSError, SafetensorError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The format has dtypes that not every torch release has.
        raise LoadError(f"draft head {name!r} has damaged weights: {first_line(error)}") from error


# Heads before their weights are loaded, and the weights.


def _own(name: str, config: _HeadFile, weights_file: Path, base: Target) -> tuple[DraftHead, Weights]:
    if config.algorithm not in HEADS:
        known = ", ".join(sorted(HEADS))
        raise LoadError(f"draft head {name!r} is of algorithm {config.algorithm!r}; known here: {known}")
    trained_for = config.base_model
    if trained_for.fingerprint not in base.fingerprints:
        raise LoadError(
            f"draft head {name!r} belongs to the target model {trained_for.name!r} (fingerprint "
            f"{trained_for.fingerprint}), not to {base.name!r} ({base.fingerprint}): train a head for this model, or "
            "load the other one"
        )
    tensors = _read_weights(name, weights_file)
    head = _empty_head(name, config.algorithm, config.head, tensors, base, trained_for.name)
    head.provenance = Provenance(trained_for.name, trained_for.fingerprint, config.training)
    return head, tensors


def _published(name: str, config: Json, tensors: Weights, base: Target) -> tuple[DraftHead, Weights]:
    try:
        found = read_public(name, config, tensors, base)
        head = _empty_head(name, found.algorithm, found.fields, found.tensors, base, found.made_for)
    except (LoadError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Both files are untrusted; not every fault in them has its own message.
        why = f"{type(error).__name__}: {first_line(error)}"
        raise LoadError(
            f"draft head {name!r}: its {CONFIG_FILE} and weights are not as published ones: {why}"
        ) from error
    head.provenance = Provenance(found.made_for or "", base.fingerprint, {"layout": found.layout})
    return head, found.tensors


def _empty_head(
    name: str, algorithm: str, fields: Mapping[str, Any], tensors: Weights, base: Target, made_for: str | None
) -> DraftHead:
    """Return a head for the target model.

    A configuration may claim any size. So the head is first built on the meta device, and the tensors, which take no
    memory until their file is read, must have its names, shapes and types.
    """
    head_class = HEADS[algorithm]
    config = head_config(name, head_class.config_class, fields)
    refuse_other_base(name, base, made_for, {one: getattr(config, one) for one in ("hidden_size", "vocab_size")})
    with _building(name), torch.device("meta"), AtMost(len(tensors)):
        skeleton = head_class(config)
    _refuse_missing_layer(name, skeleton, base)
    _refuse_other_tensors(name, skeleton.state_dict(), tensors)
    with _building(name):  # initial values are set here: on the meta device any number is good
        return head_class(config)


def _refuse_missing_layer(name: str, head: DraftHead, base: Target) -> None:
    if head.deepest_layer >= base.num_layers:
        raise LoadError(
            f"draft head {name!r} reads layer {head.deepest_layer} of its target model, counted from 0, and "
            f"{base.name!r} has {base.num_layers} layers: name others, or load the target model that it was trained for"
        )


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Turn what a configuration makes PyTorch raise into `LoadError`."""
    try:
        yield
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        why = first_line(error)
        raise LoadError(f"draft head {name!r}: no head can be built as its {CONFIG_FILE} says: {why}") from error


def _refuse_other_tensors(name: str, expected: Weights, tensors: Weights) -> None:
    """Raise `LoadError` unless the tensors have the expected names, shapes and compatible dtypes."""
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
        allowed = _REALS if expected[key].is_floating_point() else _INTEGERS
        if tensor.dtype not in allowed:
            known = ", ".join(str(one).removeprefix("torch.") for one in allowed)
            raise LoadError(f"draft head {name!r}: tensor {key!r} is of type {tensor.dtype}; it can be {known}")
