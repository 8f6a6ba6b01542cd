"""Quantised checkpoints: which are loaded as they are, which only dequantised, and what weights are in words.

A quantised model is a target model like others: its tokens are those of its own plain decoding. That holds where
weights alone are quantised. Where activations are, too, a difference in the last bit may move one to the next of 256
steps, so that logits depend on how a text is read: token by token or as a tree, alone or beside other rows.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from drafter.errors import LoadError, first_line
from drafter.target_model.stored_weights import share_of_coded

_BITSANDBYTES, _BITS = "bitsandbytes", {"load_in_8bit": "8 bit", "load_in_4bit": "4 bit"}
_ROUNDS_ACTIVATIONS = frozenset({"bitnet", "fbgemm_fp8", "fp_quant"})
_TORCHAO_ACTIVATIONS = re.compile(r'"_type": "\w*Activation')
_ACTIVATIONS = "its activations are quantised, too, so that logits depend on how a text is read"
_INT8 = "LLM.int8 chooses columns over all rows of a forward, so that a row's tokens depend on its neighbours"


def scheme_of(config: Any) -> dict[str, Any] | None:
    """Return how a checkpoint is quantised, of its configuration or of a loaded model's; None if it is not.

    transformers warns of schemes that it does not know, and reads the weights as floating-point numbers.
    """
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    scheme: dict[str, Any] = found if isinstance(found, dict) else found.to_dict() if found else {}
    name = scheme_name(scheme)
    return scheme if name in AUTO_QUANTIZATION_CONFIG_MAPPING or name.startswith(_BITSANDBYTES) else None


def scheme_name(scheme: Mapping[str, Any]) -> str:
    """Return a scheme's name, such as `compressed-tensors` or `bitsandbytes 4 bit`."""
    method = scheme.get("quant_method")
    bits = next((bits for setting, bits in _BITS.items() if scheme.get(setting)), None)
    return f"{_BITSANDBYTES} {bits}" if bits else str(getattr(method, "value", method))


def why_inexact(scheme: Mapping[str, Any]) -> str | None:
    """Return why a scheme's own plain decoding is not a function of the text alone; None if it is, or not known."""
    name = scheme_name(scheme)
    if name == f"{_BITSANDBYTES} 8 bit":
        return _INT8
    if name in _ROUNDS_ACTIVATIONS:
        return _ACTIVATIONS
    if name == "torchao" and _TORCHAO_ACTIVATIONS.search(json.dumps(scheme.get("quant_type"), default=str)):
        return _ACTIVATIONS
    groups = scheme.get("config_groups") if name == "compressed-tensors" else None
    for preset, group in (groups or {}).items():
        if isinstance(group, Mapping):
            found = bool(group.get("input_activations") or group.get("output_activations"))
        else:  # a list of layers, by the name of a preset, such as W8A8
            found = not preset.endswith("A16")
        if found:
            return _ACTIVATIONS
    return None


def settings_of(name: str, config: Any, *, dequantize: bool) -> dict[str, Any]:
    """Return what `from_pretrained` is to be given for a model with this configuration.

    Weights of compressed-tensors are dequantised in any case: its own layers do it at the first forward.

    Raises:
        LoadError: The tokens of its plain decoding would not be a function of the text, and it is not dequantised.
    """
    scheme = scheme_of(config)
    if scheme is None:
        return {}
    found = scheme_name(scheme)
    try:
        why = why_inexact(scheme)
    except (AttributeError, TypeError) as error:
        raise LoadError(f"model {name!r}: its quantization_config cannot be read: {first_line(error)}") from error
    if why is not None and not dequantize:
        raise LoadError(
            f"model {name!r} is quantised by {found}, and {why}: load it dequantised (loading.dequantize true, in "
            "Python dequantize=True), or take a checkpoint whose weights alone are quantised"
        )
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(found)
    takes = kind is not None and "dequantize" in inspect.signature(kind.__init__).parameters
    if takes and (dequantize or found == "compressed-tensors"):
        dense = copy.deepcopy(config)
        dense.quantization_config = {**scheme, "dequantize": True}
        return {"config": dense}
    return {}


@torch.no_grad()
def dequantised(name: str, model: Any) -> Any:
    """Return a loaded model with floating-point weights in place of quantised ones, or raise `LoadError`."""
    if scheme_of(model.config) is None:
        return model
    quantizer, found = model.hf_quantizer, 0
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and is_traceable_wrapper_subclass(weight := module.weight):
            dense: Any = weight
            module.weight = nn.Parameter(dense.dequantize().to(model.dtype), requires_grad=False)
            found += 1
    if found:
        quantizer.remove_quantization_config(model)
        return model
    try:
        return model.dequantize(dtype=model.dtype)
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise LoadError(f"model {name!r} cannot be loaded dequantised: {first_line(error)}") from error


def compute_in_fp32(model: Any) -> None:
    """Let the layers of bitsandbytes in an fp32 model compute in fp32.

    They round activations to bf16 where a checkpoint names that as its type to compute in, and in any case on a CPU
    with instructions for it: draft trees would have other logits than the text alone.
    """
    for module in model.modules():
        if model.dtype == torch.float32 and type(module).__module__.startswith(f"{_BITSANDBYTES}."):
            module.compute_dtype, module.support_avx512bf16_for_cpu = torch.float32, False


def weights_in_words(model: Any, stored: str | None) -> str:
    """Return what a loaded model's weights are, such as `compressed-tensors, dequantised to float32`.

    Args:
        stored: How they are stored; None for floating-point numbers.
    """
    scheme, dtype = scheme_of(model.config), str(model.dtype).removeprefix("torch.")
    if stored is None:
        return dtype
    if coded := share_of_coded(model):
        return f"{stored}, {'partly ' if coded < 1 else ''}as stored"
    return f"{stored}, dequantised to {dtype}" if scheme is None else f"{stored}, as stored"
