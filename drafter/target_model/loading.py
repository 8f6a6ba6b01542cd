"""Load a target model from the hub or a local folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from drafter.errors import LoadError, RequestError, first_line, one_line
from drafter.gguf_files import gguf_file, metadata_read_once, pretrained
from drafter.hub import not_found
from drafter.prompt import Prompt
from drafter.target_model.adapters import merge_adapter
from drafter.target_model.architecture import (
    TIE_WEIGHTS,
    auto_class,
    make_model,
    refuse_unsupported,
    sees,
    target_fingerprint,
)
from drafter.target_model.formats import (
    compute_in_fp32,
    dequantised,
    scheme_name,
    scheme_of,
    settings_of,
    weights_in_words,
)
from drafter.target_model.model import BaseModel
from drafter.target_model.stored_weights import stored_weights
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

_DEVICES = ("cpu", "cuda", "meta")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Example(Protocol):
    """Makes a prompt with an image, by the processor of a model that sees; raises `LoadError` or `RequestError`."""

    def __call__(self, name: str, *, trust_remote_code: bool) -> Prompt: ...


def load_base(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    generation_config: Literal["auto", "ignore"] = "auto",
    adapter: str | Path | None = None,
    dequantize: bool = False,
    eyes: Example | None = None,
    ranks: int = 1,
    on_stage: Callable[[str], None] = logger.info,
) -> BaseModel:
    """Load a target model; its weights must be safetensors, or a GGUF file.

    Args:
        name_or_path: Hub id, folder, or GGUF file; see `gguf_file`.
        device: Not used with `device_map`.
        device_map: As in transformers, for a model larger than one GPU.
        trust_remote_code: Run modeling code that comes with the weights.
        generation_config: `ignore` leaves out the sampling settings of the model's `generation_config.json`; its
            end-of-sequence tokens stay.
        adapter: A LoRA adapter that is merged into the weights: folder or hub id.
        dequantize: Load quantised weights as floating-point numbers of `dtype`.
        eyes: Asked only for a model with a vision tower; see `BaseModel`. Without it, no images are read.
        ranks: Processes that have joined (`torch.distributed`) and load a part of the model each, at the same time.
        on_stage: Called with a message before the proof, which may take longer than reading the weights.

    Raises:
        LoadError: Not found, not readable, or not a model that can verify draft trees.
    """
    name = os.path.expanduser(name_or_path)
    target = pick_device(device)
    gguf = gguf_file(name)
    with metadata_read_once() if gguf else nullcontext():
        config = load_config(name, trust_remote_code=trust_remote_code)
        refuse_unsupported(name, config)
        if files := [gguf] if gguf else weight_files(name, config):
            refuse_too_large(name, config, files, trust_remote_code=trust_remote_code)
        source, kwargs = pretrained(name)
        kwargs |= {"trust_remote_code": trust_remote_code, "dtype": pick_dtype(dtype, target)}
        stored: str | None = "GGUF"
        if gguf is not None:
            kwargs["quantization_config"] = GgufConfig(dequantize=True)
        else:
            kwargs |= {"use_safetensors": True, **settings_of(name, config, dequantize=dequantize)}
            stored = None if (scheme := scheme_of(config)) is None else scheme_name(scheme)
        if device_map is not None:
            kwargs["device_map"] = device_map
        elif ranks > 1:
            kwargs["distributed_config"] = DistributedConfig(tp_size=ranks)
        elif target.type == "cuda" and is_accelerate_available():
            # Weights go to a GPU as they are read: the host need not hold those of all engines of a node.
            kwargs["device_map"] = {"": target}
        # The fused kernels cannot cap attention scores.
        if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            kwargs["attn_implementation"] = "eager"
        model = _read(name, partial(auto_class(config).from_pretrained, source, **kwargs))
        floats = (
            dequantize or adapter is not None or device_map is not None or ranks > 1 or model.dtype != torch.float32
        )
        blocks = None if gguf is None or floats or target.type != "cpu" else stored_weights(gguf, model)
    if dequantize:
        model = dequantised(name, model)
    compute_in_fp32(model)
    if device_map is None and ranks == 1:
        model = _moved(name, model, target)
    for place in {parameter.device for parameter in model.parameters()}:  # a device map may choose others
        _refuse_other_device(f"of weights of {name!r}", place)
    if generation_config == "ignore":
        tokens = {name: getattr(model.generation_config, name) for name in _SPECIAL_TOKENS}
        model.generation_config = GenerationConfig(**tokens)
    weights, before = weights_in_words(model, stored), None
    if adapter is not None:
        before, weights = target_fingerprint(model), f"{weights}, with the adapter {adapter} merged"
        model = merge_adapter(name, model, str(adapter))
    example, blind = None, ""
    if eyes is not None and gguf is None and sees(config):  # GGUF files have the part of a model that reads text
        try:
            example = eyes(name, trust_remote_code=trust_remote_code)
        except (LoadError, RequestError) as reason:
            blind = f"{name} reads text alone here: {reason}"
            logger.warning(blind)
    on_stage("proving that draft trees have the model's own logits")
    base = BaseModel(model, name, example=example, weights=weights, before_adapter=before, stored=blocks, ranks=ranks)
    base.blind = blind or base.blind
    if blocks:
        base.weights = weights_in_words(model, stored)
    return base


def _read(name: str, load: Callable[..., Any]) -> Any:
    """Return the model that `from_pretrained` of transformers reads, with all of its weights, or raise `LoadError`."""
    try:
        with _quiet():
            # Mismatched sizes are reported with the others, and refused.
            model, report = make_model(partial(load, output_loading_info=True, ignore_mismatched_sizes=True))
        refuse_unfit(name, model, report)
        require_data(name, model)
    except LoadError:
        raise
    except ModuleNotFoundError as error:
        reason = f"the package {error.name} is missing here, which reads its weights"
        raise LoadError(f"model {name!r} cannot be loaded: {reason}") from error
    except (*STRANGE, ImportError) as error:
        reason = first_line(error)
        if "conversion of the weights" in reason:
            reason = "its files lack parts of a tensor that transformers puts together, which it lists above"
        raise LoadError(f"model {name!r} cannot be loaded: {reason}") from error
    except Exception as error:  # safetensors raises a class of its own for a damaged file
        if type(error).__module__.startswith("safetensors") or "Safetensor" in type(error).__name__:
            raise LoadError(f"model {name!r} has damaged weights: {first_line(error)}") from error
        raise
    return model


def _moved(name: str, model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, ValueError) as error:  # such as too little memory
        raise LoadError(f"model {name!r} cannot be moved to {device}: {first_line(error)}") from error


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model, given by hub id, folder or GGUF file, or raise `LoadError`."""
    name = os.path.expanduser(name_or_path)
    source, settings = pretrained(name)
    folder, kwargs = Path(name), settings | {"trust_remote_code": trust_remote_code}
    refuse_adapter(source)
    try:
        refuse_endless_lists(name, PreTrainedConfig.get_config_dict(source, **kwargs)[0])
        return AutoConfig.from_pretrained(source, **kwargs)
    except LoadError:
        raise
    except Exception as error:  # transformers, the hub's client and remote code have errors of their own
        if "gguf_file" in settings:
            raise LoadError(
                f"model {name!r}: {settings['gguf_file']} is damaged, or is of a kind that transformers does not read: "
                f"{one_line(error, 300)}"
            ) from error
        if folder.is_dir() and not (folder / "config.json").is_file():
            reason = f"it has no config.json{what_else(folder)}"
        elif folder.exists():
            reason = one_line(error, 300) if folder.is_dir() else "it is a file"
        else:
            reason = "there is no such folder" if name.startswith(("/", ".")) else not_found(error)
        raise LoadError(
            f"no model at {name!r}: {reason} (give a folder with config.json, a GGUF file, or a hub id)"
        ) from error


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
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device {device!r} is not available here: {first_line(error)}") from error
    _refuse_other_device(repr(device), found)
    return found


def _refuse_other_device(what: str, device: torch.device) -> None:
    if device.type not in _DEVICES:
        raise LoadError(f"device {what}: engines run on CPUs and on GPUs that torch calls cuda, not on {device.type}")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve a dtype, or raise `LoadError`; `auto` is bf16 on a GPU and fp32 on a CPU, where bf16 is rarely faster."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LoadError(f"dtype {dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return found
