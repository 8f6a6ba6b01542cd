"""Saves and loads draft heads: `config.json` and `model.safetensors` in a folder or on the hub."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drafter.errors import LoadError, first_line
from drafter.heads.config import head_config
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.layouts import public_config, read_public
from drafter.heads.published import refuse_other_base
from drafter.hub import hub_file, not_found
from drafter.target.model import BaseModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PUBLISHED_WEIGHTS = (WEIGHTS_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
"""Accepted names of the weights file."""
UNPICKLE = "python -m drafter.heads.unpickle"
"""Converts pickled weights in a restricted process."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def find_files(name: str) -> tuple[Path, Path]:
    """Return the paths of configuration and weights in a folder or of a hub id (`HF_HUB_OFFLINE` is respected).

    Raises:
        LoadError: The head does not exist, or lacks one of the files.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(name, folder)
    if folder.exists():
        raise LoadError(f"draft head {name!r} is a file: give the folder that holds it")
    hint = f"give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"no draft head at {name!r}: there is no such folder; {hint}")
    return _on_hub(name, hint)


def _in_folder(name: str, folder: Path) -> tuple[Path, Path]:
    if not (folder / CONFIG_FILE).is_file():
        raise LoadError(f"draft head {name!r} has no {CONFIG_FILE}: give a folder that a draft head was saved in")
    weights = next((folder / one for one in PUBLISHED_WEIGHTS if (folder / one).is_file()), None)
    if weights is None:
        raise LoadError(f"draft head {name!r} has no {WEIGHTS_FILE}{_only_pickles(folder)}")
    return folder / CONFIG_FILE, weights


def _on_hub(name: str, hint: str) -> tuple[Path, Path]:
    try:
        config_file = hub_file(name, CONFIG_FILE)
    except (OSError, ValueError, RuntimeError, HFValidationError) as error:
        raise LoadError(
            f"no draft head at {name!r}: no such folder, and as a hub id: {not_found(error)}; {hint}"
        ) from error
    for weights in PUBLISHED_WEIGHTS:
        try:
            return config_file, hub_file(name, weights)
        except EntryNotFoundError as error:
            missing = error
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"draft head {name!r}: {weights} cannot be downloaded: {first_line(error)}") from error
    reason = "is not in the local cache, and the hub cannot be reached"
    if not _is_offline(missing):
        reason = f"is not there; pickled weights are never loaded: `hf download {name}`, then `{UNPICKLE} FOLDER`"
    raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} {reason}") from missing


def _is_offline(error: BaseException) -> bool:
    return isinstance(error, LocalEntryNotFoundError)


def _only_pickles(folder: Path) -> str:
    """Return a hint if the folder has only pickled weights."""
    found = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not found:
        return ""
    return (
        f", only {found[0]}: pickles are never loaded, because loading one runs code; `{UNPICKLE} {folder}` converts it"
    )


FORMAT_VERSION = 1
_CALLS_PER_TENSOR = 1000
"""Limit of torch calls per tensor while a head is built; a dozen is usual."""
_REALS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
"""Accepted dtypes in a file; they are converted to the head's."""


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


def save_head(head: DraftHead, folder: str | Path) -> None:
    """Write a head's folder, replacing the files of an earlier head.

    Raises:
        ValueError: `provenance` is not set.
    """
    if head.provenance is None:
        raise ValueError("a head is saved with its provenance: set head.provenance first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    origin = head.provenance
    config = _HeadFile(
        format_version=FORMAT_VERSION,
        algorithm=head.algorithm,
        base_model=_BaseOfHead(origin.base_name, origin.base_fingerprint),
        head=dataclasses.asdict(head.config),
        training=dict(origin.training),
    )
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    _replace(folder / WEIGHTS_FILE, lambda file: save_file(tensors, file, metadata={"format": "pt"}))
    _replace(folder / CONFIG_FILE, lambda file: file.write_text(text))


def load_head(name_or_path: str | Path, base: BaseModel, algorithms: Mapping[str, type[DraftHead]]) -> DraftHead:
    """Load a draft head from a folder or hub id in evaluation mode, on the target model's device and in its dtype.

    Raises:
        LoadError: The head does not exist, its algorithm or configuration is unknown, its weights are damaged, missing,
            misshapen or pickled, or it belongs to another target model. The message names the head and what to do.
    """
    name = str(name_or_path)
    config_file, weights_file = find_files(name)
    if (public := public_config(config_file)) is not None:
        return _ready(name, *_published(name, public, _read_weights(name, weights_file), base, algorithms), base)
    config = _read_config(name, config_file)
    if config.algorithm not in algorithms:
        known = ", ".join(sorted(algorithms))
        raise LoadError(f"draft head {name!r} is of algorithm {config.algorithm!r}; known here: {known}")
    trained_for = config.base_model
    if not base.has_fingerprint(trained_for.fingerprint):
        raise LoadError(
            f"draft head {name!r} belongs to the target model {trained_for.name!r} (fingerprint "
            f"{trained_for.fingerprint}), not to {base.name!r} ({base.fingerprint}): train a head for this model, or "
            "load the other one"
        )
    tensors = _read_weights(name, weights_file)
    head = _new_head(name, algorithms[config.algorithm], config.head, tensors, base, trained_for.name)
    head.provenance = Provenance(trained_for.name, trained_for.fingerprint, config.training)
    return _ready(name, head, tensors, base)


def is_head_of(name_or_path: str | Path, base: BaseModel) -> bool:
    """Return whether a draft head, in a folder or by hub id, was trained for this target model.

    Raises:
        LoadError: The head does not exist, or its `config.json` cannot be read.
    """
    name = str(name_or_path)
    return base.has_fingerprint(_read_config(name, find_files(name)[0]).base_model.fingerprint)


def _published(
    name: str,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    base: BaseModel,
    algorithms: Mapping[str, type[DraftHead]],
) -> tuple[DraftHead, dict[str, Tensor]]:
    """Return a published head, without its weights, and the weights."""
    try:
        found = read_public(name, config, tensors, base)
        head = _new_head(name, algorithms[found.algorithm], found.fields, found.tensors, base, found.made_for)
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


class _AtMost(TorchFunctionMode):
    """Limits the number of torch calls in a `with` block."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more layers than {WEIGHTS_FILE} has tensors for")
        return func(*args, **(kwargs or {}))


def _new_head(
    name: str,
    head_class: type[DraftHead],
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    base: BaseModel,
    made_for: str | None,
) -> DraftHead:
    """Return a head for the target model, before its weights are loaded.

    A configuration may claim any size. So the head is first built on the meta device, and the tensors, which take no
    memory until their file is read, must have its names, shapes and types.

    Raises:
        LoadError: The configuration is invalid, or does not fit the tensors or the target model.
    """
    config = head_config(name, head_class.config_class, fields)
    refuse_other_base(name, base, made_for, {one: getattr(config, one) for one in ("hidden_size", "vocab_size")})
    with _building(name), torch.device("meta"), _AtMost(_CALLS_PER_TENSOR * (1 + len(tensors))):
        skeleton = head_class(config)
    if skeleton.deepest_layer >= base.num_layers:
        raise LoadError(
            f"draft head {name!r} reads layer {skeleton.deepest_layer} of its target model, counted from 0, and "
            f"{base.name!r} has {base.num_layers} layers: load the target model that it was trained for"
        )
    _refuse_other_tensors(name, skeleton.state_dict(), tensors)
    with _building(name):  # initial values are set here: on the meta device any number is good
        return head_class(config)


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Turn what a configuration makes PyTorch raise into `LoadError`."""
    try:
        yield
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        why = first_line(error)
        raise LoadError(f"draft head {name!r}: no head can be built as its {CONFIG_FILE} says: {why}") from error


def _ready(name: str, head: DraftHead, tensors: dict[str, Tensor], base: BaseModel) -> DraftHead:
    """Load the weights into the head and make it ready to draft."""
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"draft head {name!r}: tensor {key!r} holds values that are not finite")
    head.load_state_dict(tensors)
    head.to(base.device, base.dtype).eval().requires_grad_(False)
    if head.vocabulary is not None:
        try:
            head.vocabulary.borrow(base)
        except ValueError as error:
            raise LoadError(f"draft head {name!r}: {error}") from error
    return head


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write atomically: to a temporary file beside `target`, then rename."""
    temporary = target.with_name(target.name + ".tmp")
    write(temporary)
    temporary.replace(target)


def _read_config(name: str, file: Path) -> _HeadFile:
    try:
        config = TypeAdapter(_HeadFile).validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} cannot be read: {first_line(error)}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        match first["type"], first["loc"]:
            case "json_invalid", _:
                reason = f"cannot be read: {first['msg']}"
            case _, ("base_model", _):
                reason = "does not name its target model and fingerprint"
            case _:
                needed = ", ".join(one.name for one in dataclasses.fields(_HeadFile))
                reason = f"is not a draft head's (which has {needed})"
        raise LoadError(f"draft head {name!r}: {CONFIG_FILE} {reason}") from error
    if config.format_version != FORMAT_VERSION:
        raise LoadError(
            f"draft head {name!r} is of format version {config.format_version}; this release reads {FORMAT_VERSION}"
        )
    return config


def _read_weights(name: str, file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)  # type: ignore[no-any-return]
    except (OSError, SafetensorError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The format has dtypes that not every torch release has.
        raise LoadError(f"draft head {name!r} has damaged weights: {first_line(error)}") from error


def _refuse_other_tensors(name: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
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
