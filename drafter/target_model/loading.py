"""Load a target model from the hub or a local folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from drafter.errors import LoadError, first_line, one_line
from drafter.hub import local_only, not_found
from drafter.prompt import Prompt
from drafter.target_model.architecture import TIE_WEIGHTS, auto_class, make_model, refuse_unsupported
from drafter.target_model.model import BaseModel
from drafter.target_model.weights import (
    STRANGE,
    refuse_adapter,
    refuse_endless_lists,
    refuse_too_large,
    refuse_unfit,
    weight_files,
    what_else,
)

logger = logging.getLogger(__name__)

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_base(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    generation_config: Literal["auto", "ignore"] = "auto",
    example: Prompt | None = None,
    on_stage: Callable[[str], None] = logger.info,
) -> BaseModel:
    """Load a target model; its weights must be safetensors.

    Args:
        name_or_path: Hub id or folder.
        device: Not used with `device_map`.
        device_map: As in transformers, for a model larger than one GPU.
        trust_remote_code: Run modeling code that comes with the weights.
        generation_config: `ignore` leaves out the sampling settings of the model's `generation_config.json`; its
            end-of-sequence tokens stay.
        example: A prompt with an image, if such prompts are to be read; see `BaseModel`.
        on_stage: Called with a message before the proof, which may take longer than reading the weights.

    Raises:
        LoadError: Not found, not readable, or not a model that can verify draft trees.
    """
    name = os.path.expanduser(name_or_path)
    target = pick_device(device)
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local_only(name)}
    config = load_config(name, trust_remote_code=trust_remote_code)
    refuse_unsupported(name, config)
    if files := weight_files(name, config):
        refuse_too_large(name, config, files, trust_remote_code=trust_remote_code)
    kwargs |= {"dtype": pick_dtype(dtype, target), "use_safetensors": True, "output_loading_info": True}
    kwargs["ignore_mismatched_sizes"] = True  # they are reported with the others, and refused
    if device_map is not None:
        kwargs["device_map"] = device_map
    # The fused kernels cannot cap attention scores.
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        kwargs["attn_implementation"] = "eager"
    try:
        with _quiet():
            model, report = make_model(partial(auto_class(config).from_pretrained, name, **kwargs))
        refuse_unfit(name, model, report)
        require_data(name, model)
        if device_map is None:
            model = model.to(target)
    except LoadError:
        raise
    except (*STRANGE, ImportError) as error:
        reason = first_line(error)
        if "conversion of the weights" in reason:
            reason = "its files lack parts of a tensor that transformers puts together, which it lists above"
        raise LoadError(f"model {name!r} cannot be loaded: {reason}") from error
    except Exception as error:  # safetensors raises a class of its own for a damaged file
        if type(error).__module__.startswith("safetensors") or "Safetensor" in type(error).__name__:
            raise LoadError(f"model {name!r} has damaged weights: {first_line(error)}") from error
        raise
    if generation_config == "ignore":
        tokens = {name: getattr(model.generation_config, name) for name in _SPECIAL_TOKENS}
        model.generation_config = GenerationConfig(**tokens)
    on_stage("proving that draft trees have the model's own logits")
    return BaseModel(model, name, example=example)


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model, given by hub id or folder, or raise `LoadError`."""
    name = os.path.expanduser(name_or_path)
    folder, kwargs = Path(name), {"trust_remote_code": trust_remote_code, "local_files_only": local_only(name)}
    refuse_adapter(name)
    try:
        refuse_endless_lists(name, PreTrainedConfig.get_config_dict(name, **kwargs)[0])
        return AutoConfig.from_pretrained(name, **kwargs)
    except LoadError:
        raise
    except Exception as error:  # transformers, the hub's client and remote code have errors of their own
        if folder.is_dir() and not (folder / "config.json").is_file():
            reason = f"it has no config.json{what_else(folder)}"
        elif folder.exists():
            reason = one_line(error, 300) if folder.is_dir() else "it is a file"
        else:
            reason = "there is no such folder" if name.startswith(("/", ".")) else not_found(error)
        raise LoadError(f"no model at {name!r}: {reason} (give a folder with config.json, or a hub id)") from error


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
