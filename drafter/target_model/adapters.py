"""A LoRA adapter becomes a part of a target model's weights as it is loaded, by peft."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from drafter.errors import LoadError, first_line, shown
from drafter.hub import hub_file, not_found
from drafter.target_model.architecture import transformers_loading
from drafter.target_model.formats import scheme_name, scheme_of
from drafter.target_model.weights import ADAPTER_CONFIG, STRANGE

_log = logging.getLogger(__name__)
_WEIGHTS = "adapter_model.safetensors"


def merge_adapter(name: str, model: Any, adapter: str) -> Any:
    """Return a model with the weights that peft's `merge_and_unload` gives it.

    Args:
        name: The model's, for messages.
        adapter: Folder or hub id of the adapter.

    Raises:
        LoadError: There is no such adapter, it is no LoRA, it does not fit the model, or weights are missing; peft is
            not installed; or the model is quantised, so that the sum would be rounded.
    """
    folder = adapter_folder(adapter)
    settings = _settings(adapter, folder)
    if (scheme := scheme_of(model.config)) is not None:
        raise LoadError(
            f"adapter {adapter!r}: {name!r} is quantised by {scheme_name(scheme)}, and merging would round the weights "
            "again: load it dequantised (loading.dequantize true, in Python dequantize=True)"
        )
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ModuleNotFoundError as error:
        raise LoadError(f"adapter {adapter!r} needs the package {error.name}: pip install peft") from error
    made_for = str(settings.get("base_model_name_or_path") or "")
    if made_for and Path(made_for).name != Path(name).name:
        _log.warning("adapter %s was made for %s, and is merged into %s", adapter, made_for, name)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    try:
        tensors = load_file(folder / _WEIGHTS)
        config = peft.PeftConfig.from_pretrained(str(folder))
        with transformers_loading():
            adapted = peft.PeftModel(model, config)
            outer = (model.get_input_embeddings(), model.get_output_embeddings())
            if tied and any(isinstance(one, BaseTunerLayer) for one in outer):
                raise LoadError(
                    f"adapter {adapter!r} changes the embeddings or the LM head of {name!r}, which share weights: "
                    "merged, it would change both; untie them before training"
                )
            whole = any(key.endswith(".base_layer.weight") for key in tensors)  # of embeddings, if they are adapted
            asked = peft.get_peft_model_state_dict(adapted, save_embedding_layers=whole)
            _refuse_unfit(adapter, name, asked, tensors)
            peft.set_peft_model_state_dict(adapted, tensors)
            return adapted.merge_and_unload(safe_merge=True)
    except LoadError:
        raise
    except Exception as error:  # peft's errors, and those of safetensors for a damaged file, are of many classes
        raise LoadError(f"adapter {adapter!r} cannot be merged into {name!r}: {first_line(error)}") from error


def adapter_folder(adapter: str) -> Path:
    """Return the folder of an adapter, downloaded if need be; raise `LoadError` if there is none."""
    folder = Path(os.path.expanduser(adapter))
    if folder.is_dir():
        if absent := [file for file in (ADAPTER_CONFIG, _WEIGHTS) if not (folder / file).is_file()]:
            raise LoadError(f"adapter {adapter!r} has no {absent[0]}: give the folder that peft saved, as safetensors")
        return folder
    try:
        files = [hub_file(adapter, file) for file in (ADAPTER_CONFIG, _WEIGHTS)]
    except (OSError, ValueError, RuntimeError) as error:
        raise LoadError(f"no adapter at {adapter!r}: no such folder, and as a hub id: {not_found(error)}") from error
    return files[0].parent


def _settings(adapter: str, folder: Path) -> dict[str, Any]:
    try:
        settings = dict(json.loads((folder / ADAPTER_CONFIG).read_bytes()))
    except STRANGE as error:
        raise LoadError(f"adapter {adapter!r}: {ADAPTER_CONFIG} cannot be read: {first_line(error)}") from error
    if (kind := settings.get("peft_type")) != "LORA":
        raise LoadError(f"adapter {adapter!r} is of the type {shown(kind)}: those of the type LORA are merged")
    if settings.get("layer_replication"):
        raise LoadError(f"adapter {adapter!r} repeats layers (layer_replication): merge it, and load the whole model")
    return settings


def _refuse_unfit(adapter: str, name: str, asked: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise `LoadError` unless a file has just the tensors that an adapter's settings ask for in this model."""
    has, takes = ({key: list(one.shape) for key, one in some.items()} for some in (tensors, asked))
    for key in sorted(has.keys() | takes.keys()):
        if has.get(key) != takes.get(key):
            raise LoadError(
                f"adapter {adapter!r} does not fit {name!r}: for {key} its file has {_shape(has.get(key))}, and the "
                f"model takes {_shape(takes.get(key))}: the file is torn, or the adapter of another model"
            )


def _shape(sizes: list[int] | None) -> str:
    return "nothing" if sizes is None else f"the shape {sizes}"
