"""A model's weight files: which they are, whether they can hold what `config.json` asks for, and what did not fit."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.gguf import read_gguf_metadata

from drafter.errors import LoadError, first_line, shown
from drafter.hub import hub_answers, hub_file
from drafter.target_model.architecture import auto_class, make_model
from drafter.target_model.formats import scheme_name, scheme_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that transformers raises for malformed configurations, such as one nested too deep."""
ADAPTER_CONFIG = "adapter_config.json"
_LFS = b"version https://git-lfs"
_MOST_LISTED = 10_000  # layers or labels: a configuration makes lists of so many before anything is built
_CALLS_PER_TENSOR = 1000  # torch calls while a model is built; a dozen is usual
_UNWRITTEN = 1 << 26  # elements that a model may have without a file that holds them, such as masks
_PACKED = 8  # most elements that a quantised checkpoint packs into a byte
_INSTEAD = {
    "*.gguf": "give that file as the model",
    "pytorch_model*.bin": "pickled weights are never loaded: load it by transformers, and save_pretrained",
    "*.pth": "pickled weights are never loaded: take the published model with safetensors",
    "*.safetensors": f"rename it to {WEIGHTS} if it holds all of the weights under transformers' names",
    "*.distcp": "it is a part of a training's state: merge it by `accelerate merge-weights`",
    "checkpoint-*": "give the folder of one checkpoint",
    "snapshots/*": "give that folder",
}
"""What folders have instead of a model's weights, and what to do with it."""


def weight_files(name: str, config: Any) -> list[Path]:
    """Return a model's weight files, downloaded if need be; none for a repository whose files only the hub knows.

    Raises:
        LoadError: A file is missing or outside of the model's folder, or the weights have a format that is not read.
    """
    if (named := getattr(config, "transformers_weights", None)) is not None:
        _refuse_path(name, "config.json", named)
    local = Path(name).is_dir()
    folder = Path(name) if local else _fetched(name, [named or WEIGHTS, INDEX])
    if folder is None:
        return []
    first = named or (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX)
    files = [first]
    if first.endswith(".json") and (folder / first).is_file():
        files = sorted(set(read_weight_map(name, folder / first).values()))
        folder = folder if local else _fetched(name, files) or folder
    if local:
        _refuse_links(name, folder, {first, *files})
    if absent := [file for file in files if not (folder / file).is_file()]:
        if absent == [first]:
            if not local:  # the hub may convert pickled weights
                return []
            raise LoadError(f"model {name!r} has no {named or WEIGHTS}{what_else(folder)}")
        raise LoadError(
            f"model {name!r}: {len(absent)} of the {len(files)} weight files that {first} names are missing, first "
            f"{absent[0]}: download the model again"
        )
    return [folder / file for file in files]


def _fetched(name: str, files: list[str]) -> Path | None:
    """Return the folder of a hub repository with these files as far as it has them; None if it cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=not hub_answers()))
    except (OSError, RuntimeError, ValueError):
        return None  # loading the model reports the error


def what_else(folder: Path) -> str:
    """Return what to do with the weights that a folder has instead of a model's, as the end of a sentence."""
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        return ""
    for pattern, advice in _INSTEAD.items():
        if found := sorted(folder.glob(pattern)):
            return f", but {found[0].name}; {advice}"
    return " and no weights: download the model again, or save it with save_pretrained"


def read_weight_map(name: str, index: Path) -> dict[str, str]:
    """Return the file of each tensor of a sharded checkpoint, from its `model.safetensors.index.json`.

    Raises `LoadError` if it cannot be read, or names a file that is not beside it.
    """
    try:
        found: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = set(found.values())
    except STRANGE as error:
        raise LoadError(f"model {name!r}: {index.name} cannot be read: {first_line(error)}") from error
    for file in files:
        _refuse_path(name, index.name, file)
    return found


def _refuse_path(name: str, file: str, named: object) -> None:
    if not isinstance(named, str) or named in ("", ".", "..") or Path(named).name != named:
        raise LoadError(
            f"model {name!r}: {file} names the weights {shown(named)}, which are not a file in its folder: the "
            "folder is the model, so put them there"
        )


def _refuse_links(name: str, folder: Path, files: Collection[str]) -> None:
    """Refuse weights outside of the model's own folder; only the hub's cache may link to its blobs."""
    here = folder.resolve()
    homes = [here, *([here.parents[1].joinpath("blobs").resolve()] if here.parent.name == "snapshots" else [])]
    for file in sorted(files):
        target = (folder / file).resolve()
        if target.parent not in homes:
            raise LoadError(
                f"model {name!r}: {file} is a link to {str(target)!r}, which is not in its folder: copy it there"
            )


def refuse_adapter(name: str) -> None:
    """Raise `LoadError` for a folder or repository with a PEFT adapter, which transformers applies if it has peft."""
    try:
        file = Path(name) / ADAPTER_CONFIG if Path(name).is_dir() else hub_file(name, ADAPTER_CONFIG)
        of = json.loads(file.read_bytes()).get("base_model_name_or_path")
    except STRANGE:
        return
    raise LoadError(
        f"model {name!r} has a PEFT adapter ({ADAPTER_CONFIG}) of {shown(of)}: give that as model and this as "
        f"loading.adapter (in Python adapter), or remove {ADAPTER_CONFIG} if the weights beside it are merged already"
    )


# ---- before anything is built: sizes


def refuse_endless_lists(name: str, config: Mapping[str, Any]) -> None:
    """Raise `LoadError` if a `config.json` asks for more layers or labels than any model has."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            refuse_endless_lists(name, value)
        elif isinstance(value, int) and value > _MOST_LISTED and re.search(r"(layers?|labels)$", key):
            raise LoadError(f"model {name!r}: config.json says {key} = {value:,}, and no model has so many")


def skeleton(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the model of a configuration without data. May raise any error of the model's class."""
    with torch.device("meta"):
        settings = {"trust_remote_code": trust_remote_code}
        return make_model(partial(auto_class(config).from_config, copy.deepcopy(config), **settings))


class AtMost(TorchFunctionMode):
    """Limits the torch calls in a `with` block to those of a model of so many `tensors`, or raises `ValueError`."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self._left = _CALLS_PER_TENSOR * (1 + tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooManyError("it has more layers than its weight files have tensors for")
        return func(*args, **(kwargs or {}))


class _TooManyError(ValueError):
    pass


def refuse_too_large(name: str, config: Any, files: list[Path], *, trust_remote_code: bool) -> None:
    """Raise `LoadError` for a model with far more layers or parameters than its weight files can hold.

    A loader gives memory to all that a configuration asks for, whether there are weights for it or not.
    """
    tensors = sum(_count_tensors(name, file) for file in files)
    held = sum(file.stat().st_size for file in files)
    packed = any(getattr(config, scheme, None) for scheme in ("quantization_config", "compression_config"))
    packed = packed or any(file.suffix == ".gguf" for file in files)
    most = held * (_PACKED if packed else 1) + _UNWRITTEN
    try:
        with AtMost(tensors):
            model = skeleton(config, trust_remote_code=trust_remote_code)
        asked = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
    except _TooManyError as error:
        raise LoadError(f"model {name!r} is not as config.json says: {error} ({tensors} in {_bytes(held)})") from error
    except Exception:  # a model's code may raise anything; loading reports it, or does without a skeleton
        return
    if asked > most:
        raise LoadError(
            f"model {name!r} is not as config.json says: it would have {asked:,} numbers, and its weight files have "
            f"{_bytes(held)}: the configuration is of another model, or weight files are missing"
        )


def _count_tensors(name: str, file: Path) -> int:
    try:
        if file.suffix == ".gguf":
            return len(read_gguf_metadata(str(file))[1])
        with safe_open(file, "pt") as tensors:
            return len(tensors.keys())
    except Exception as error:  # safetensors has a class of its own
        reason = first_line(error)
        with file.open("rb") as content:
            if content.read(len(_LFS)) == _LFS:
                reason = "it is a pointer of Git LFS, and the weights are elsewhere: `git lfs pull`"
        raise LoadError(f"model {name!r} has damaged weights: {file.name}: {reason}") from error


def _bytes(size: int) -> str:
    return f"{size:,} bytes" if size < 1 << 20 else f"{size / 2**20:,.1f} MiB"


# ---- after loading: what transformers reports

_LOOKED_AT = 9  # missing tensors that are looked for under other names
_LAYER = re.compile(r"(.*?\.)(\d+)\.")
_LORA = re.compile(r"lora_|\.base_layer\.|modules_to_save")
_OTHER_HEAD = re.compile(r"^(score|classifier|classification_head|qa_outputs|reward_head)\b")
_QUANTISED = re.compile(r"scale|qweight|qzeros|absmax|quant_|packed|\.SCB$")
_NO_SCHEME = (
    "the weights are quantised, and config.json has no quantization_config that transformers knows; take that of the "
    "published model"
)
_WEIGHT = re.compile(r"(^|\.)(weight|qweight|weight_packed)$")
_BUFFERS = re.compile(
    r"inv_freq$|masked_bias$|attn\.bias$|attention\.bias$|causal_mask$|position_ids$|[kv]_scale$|output_scale$"
)
"""Tensors that old or quantised checkpoints have, and that no forward needs: caches, masks, scales of a KV cache."""


def refuse_unfit(name: str, model: Any, report: Mapping[str, Collection[Any]]) -> None:
    """Raise `LoadError` if a model has not got all of its weights, or files hold weights of its layers that it lacks.

    What files hold beside the model, such as a vision tower or layers that predict further tokens, is left out, and
    transformers lists it.

    Args:
        report: What `from_pretrained` returns with `output_loading_info`.
    """
    if shapes := sorted(report["mismatched_keys"]):
        key, found, expected = shapes[0]
        raise LoadError(
            f"model {name!r}: {key}{and_more(shapes)} has the shape {list(found)}, and config.json asks for "
            f"{list(expected)}: the configuration is of another model, or was changed"
        )
    missing, others = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    quantised = getattr(model, "hf_quantizer", None) is not None
    if quantised:  # what else a scheme keeps beside the weights, and where, only its own code knows
        missing = [key for key in missing if _WEIGHT.search(key)]
    if missing:
        why = _why_missing(model, missing, others)
        raise LoadError(f"model {name!r}: its files have no {missing[0]}{and_more(missing)}: {why}")
    modules = dict(model.named_modules())
    wrong = {key: fault for key in others if (fault := _why_wrong(model, modules, key, quantised=quantised))}
    if wrong:
        key = next(iter(wrong))
        raise LoadError(f"model {name!r}: its files have {key}{and_more(wrong)}: {wrong[key]}")


def and_more(some: Collection[Any]) -> str:
    return f" (and {len(some) - 1:,} more)" if len(some) > 1 else ""


def _why_missing(model: Any, missing: list[str], others: list[str]) -> str:
    if any(map(_LORA.search, others)):
        return "the weights have a LoRA adapter that is not merged; merge_and_unload it, and save_pretrained"
    for key in missing[:_LOOKED_AT]:
        for other in others:
            if other.endswith(f".{key}"):
                return (
                    f"all names begin with {other.removesuffix(key)!r}, as torch.compile and wrappers for training "
                    "name them; save the model itself, not its wrapper, or rename the tensors"
                )
            if key.endswith(f".{other}"):
                return f"the names lack {key.removesuffix(other)!r} at the beginning; rename the tensors"
    if any(map(_QUANTISED.search, others)):
        if (scheme := scheme_of(model.config)) is None:
            return _NO_SCHEME
        return f"transformers {transformers.__version__} does not load what {scheme_name(scheme)} stores"
    if heads := [other for other in others if _OTHER_HEAD.search(other)]:
        return f"it is a classifier or a reward model ({heads[0]}), which writes no text"
    head = model.get_output_embeddings()
    if all(model.get_submodule(key.rpartition(".")[0]) is head for key in missing):
        return (
            "it is a model without its LM head, as embedding models are; take the whole language model, or let "
            "config.json say tie_word_embeddings = true if the embeddings are its head"
        )
    found = f", and have {others[0]}{and_more(others)} instead" if others else ""
    return f"the weights are not complete{found}, or config.json is of another model; download or save the model again"


def _why_wrong(model: Any, modules: Mapping[str, nn.Module], key: str, *, quantised: bool) -> str | None:
    """Return why a tensor that the model has no place for says that its numbers would be wrong; None if it does not."""
    if _LORA.search(key):
        return "a LoRA adapter that is not merged; merge_and_unload it, and save_pretrained"
    if _OTHER_HEAD.search(key) and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        return "it is a classifier or a reward model, which writes no text"
    if quantised or _BUFFERS.search(key):
        return None
    owner, place = modules.get(key.rpartition(".")[0], nn.Module()), _LAYER.match(key)
    layers = modules.get(place[1].removesuffix(".")) if place else None
    if place and isinstance(layers, nn.ModuleList):
        number, count = int(place[2]), len(layers)
        further = getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
        if count <= number < count + further:
            return None  # it predicts further tokens, and the model does without it
        if number >= count:
            return f"config.json asks for {count} layers alone; it is of another model, or was changed"
    elif not list(owner.parameters(recurse=False)):
        return None
    if _QUANTISED.search(key):
        return _NO_SCHEME
    return f"{model.config.model_type} has no such weights; config.json is of another model, or was changed"
