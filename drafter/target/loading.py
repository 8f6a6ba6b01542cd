"""Load a target model from the hub or a local folder."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from drafter.errors import LoadError, first_line, one_line, shown
from drafter.hub import hub_file, local_only, not_found
from drafter.target.architecture import TIE_WEIGHTS, make_model, refuse_unsupported
from drafter.target.model import BaseModel

logger = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that transformers raises for malformed configurations, such as one nested too deep."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_base(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    generation_config: Literal["auto", "ignore"] = "auto",
) -> BaseModel:
    """Load a target model; its weights must be safetensors.

    Args:
        name_or_path: Hub id or folder.
        device: Not used with `device_map`.
        device_map: As in transformers, for a model larger than one GPU.
        trust_remote_code: Run modeling code that comes with the weights.
        generation_config: `ignore` leaves out the sampling settings of the model's `generation_config.json`; its
            end-of-sequence tokens stay.

    Raises:
        LoadError: Not found, not readable, or not a model that can verify draft trees.
    """
    name = os.path.expanduser(name_or_path)
    target = pick_device(device)
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local_only(name)}
    try:
        config = AutoConfig.from_pretrained(name, **kwargs)
        refuse_unsupported(name, config)
    except LoadError:
        raise
    except Exception as error:  # transformers, the hub's client and remote code have errors of their own
        if Path(name).exists():
            reason = one_line(error, 300)
        else:
            reason = "there is no such folder" if name.startswith(("/", ".")) else not_found(error)
        raise LoadError(f"no model at {name!r}: {reason} (give a folder with config.json, or a hub id)") from error
    _refuse_weights_elsewhere(name, config)
    kwargs |= {"dtype": pick_dtype(dtype, target), "use_safetensors": True}
    if device_map is not None:
        kwargs["device_map"] = device_map
    # The fused kernels cannot cap attention scores.
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        kwargs["attn_implementation"] = "eager"
    try:
        with _quiet():
            model = make_model(partial(AutoModelForCausalLM.from_pretrained, name, **kwargs))
        require_data(name, model)
        if device_map is None:
            model = model.to(target)
    except LoadError:
        raise
    except (*_STRANGE, ImportError) as error:
        raise LoadError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
    except Exception as error:  # safetensors raises a class of its own for a damaged file
        if type(error).__module__.startswith("safetensors") or "Safetensor" in type(error).__name__:
            raise LoadError(f"model {name!r} has damaged weights: {first_line(error)}") from error
        raise
    if generation_config == "ignore":
        tokens = {name: getattr(model.generation_config, name) for name in _SPECIAL_TOKENS}
        model.generation_config = GenerationConfig(**tokens)
    return BaseModel(model, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bar over a model's weights, unless this project's log is shown."""

    def hidden(bar: Any, values: Any, settings: Any) -> Any:
        return bar(*values, **settings | {"disable": True})

    before = transformers_logging.set_tqdm_hook(None if logger.isEnabledFor(logging.INFO) else hidden)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def read_weight_map(name: str, index: Path) -> dict[str, str]:
    """Return the file of each tensor of a sharded checkpoint, from its `model.safetensors.index.json`.

    Raises `LoadError` if it cannot be read, or names a file that is not beside it.
    """
    try:
        found: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = set(found.values())
    except _STRANGE as error:
        raise LoadError(f"model {name!r}: {index.name} cannot be read: {first_line(error)}") from error
    for file in files:
        _refuse_path(name, index.name, file)
    return found


def _refuse_weights_elsewhere(name: str, config: Any) -> None:
    """Refuse weights outside of the model's own folder; only the hub's cache may link to its blobs."""
    if (named := getattr(config, "transformers_weights", None)) is not None:
        _refuse_path(name, "config.json", named)
    folder, first = Path(name), named or WEIGHTS
    if not folder.is_dir():
        # The hub's client joins names with its cache's folder.
        if (index := _on_hub(name, first if first.endswith(".json") else INDEX)) is not None:
            read_weight_map(name, index)
        return
    if not named and not (folder / WEIGHTS).is_file():
        first = INDEX
    files = {first}
    if first.endswith(".json") and (folder / first).is_file():
        files |= set(read_weight_map(name, folder / first).values())
    here = folder.resolve()
    homes = [here, *([here.parents[1].joinpath("blobs").resolve()] if here.parent.name == "snapshots" else [])]
    for file in sorted(files):
        target = (folder / file).resolve()
        if target.parent not in homes:
            raise LoadError(
                f"model {name!r}: {file} is a link to {str(target)!r}, which is not in its folder: copy it there"
            )


def _refuse_path(name: str, file: str, named: object) -> None:
    if not isinstance(named, str) or named in ("", ".", "..") or Path(named).name != named:
        raise LoadError(
            f"model {name!r}: {file} names the weights {shown(named)}, which are not a file in its folder: the "
            "folder is the model, so put them there"
        )


def _on_hub(name: str, file: str) -> Path | None:
    try:
        return hub_file(name, file)
    except (OSError, RuntimeError, ValueError):
        return None  # the weights are in one file, or loading them reports the error


def require_data(name: str, model: PreTrainedModel) -> None:
    """Raise `LoadError` unless every parameter and buffer has data, except weights that the device map offloads.

    Tied weights that a load in another thread left without data are tied once more.
    """
    if {"cpu", "disk"} & {str(device) for device in getattr(model, "hf_device_map", {}).values()}:
        return  # what accelerate offloads is on the meta device until a forward needs it
    if _without_data(model) is not None:
        TIE_WEIGHTS(model, recompute_mapping=False)
    if (missing := _without_data(model)) is not None:
        raise LoadError(
            f"model {name!r}: no data was loaded for {missing}; load it again, and not while other threads load "
            "models with transformers"
        )


def _without_data(model: torch.nn.Module) -> str | None:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return next((name for name, tensor in tensors if tensor.is_meta), None)


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """Resolve a device, or raise `LoadError`; `auto` is the first GPU, or the CPU."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device {device!r} is not available here: {first_line(error)}") from error


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve a dtype, or raise `LoadError`; `auto` is bf16 on a GPU and fp32 on a CPU, where bf16 is rarely faster."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LoadError(f"dtype {dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return found
