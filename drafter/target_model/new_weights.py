"""New weights for a loaded model: which of its tensors each one replaces, checked before any is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafter.errors import LoadError, shown
from drafter.target_model.architecture import make_model
from drafter.target_model.stored_weights import share_of_coded
from drafter.target_model.weights import STRANGE, and_more

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by the names of the model's `named_parameters()` or `state_dict()`, or of a whole checkpoint of it."""


def match_weights(name: str, model: Any, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    """Pair a model's own tensors with those that replace them: all of its parameters, and the buffers that are given.

    Of parameters that the model ties, one name is enough; tensors for several of them must be equal.

    Raises:
        LoadError: A name, a shape or a number is not one that the model can have, or a parameter is missing. The
            message names the first one.
    """
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    what = f"new weights for {name!r}"
    if getattr(model, "hf_quantizer", None) is not None or share_of_coded(model):
        raise LoadError(
            f"{what}: its weights are quantised, and only those of a model in floating point can change: load it "
            "dequantised (loading.dequantize true, in Python dequantize=True)"
        )
    if any(isinstance(tensor, DTensor) for tensor in own.values()):
        raise LoadError(f"{what}: it is split among processes: load the model without tensor_parallel_size")
    if offloaded := [key for key, tensor in own.items() if tensor.is_meta]:
        raise LoadError(f"{what}: {offloaded[0]} is offloaded: load the model without offloading to change its weights")
    given = _by_name(what, weights)
    if unknown := [key for key in given if key not in own]:
        why = _why_unknown(unknown, own)
        if why is not None or (read := _of_checkpoint(model, given)) is None:
            why = why or "give weights of the same architecture, under the names of the model's state_dict"
            raise LoadError(f"{what}: the model has no {unknown[0]}{and_more(unknown)}: {why}")
        given = read
    replaced: dict[int, tuple[str, Tensor]] = {}  # by the identity of the model's own tensor, which tied names share
    for key, new in given.items():
        _refuse_unfit(what, key, new, own[key])
        first, other = replaced.setdefault(id(own[key]), (key, new))
        if other is not new and not torch.equal(other, new.to(other)):
            raise LoadError(
                f"{what}: {first} and {key} differ, and the model ties them: give weights of a model with "
                "tie_word_embeddings, or load one without"
            )
    parameters = {id(parameter): key for key, parameter in model.named_parameters()}
    if missing := [key for number, key in parameters.items() if number not in replaced]:
        raise LoadError(
            f"{what}: there is no {missing[0]}{and_more(missing)}: give all parameters, such as named_parameters() or "
            "a whole state_dict"
        )
    return [(own[key], new) for key, new in replaced.values()]


def _by_name(what: str, weights: Weights) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise LoadError(f"{what}: give a state_dict, or pairs of a name and a tensor, not {shown(pair)}")
        if pair[0] in given:
            raise LoadError(f"{what}: {pair[0]} comes twice")
        given[pair[0]] = pair[1]
    return given


def _of_checkpoint(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return weights under the model's own names; None if theirs are not those of a whole checkpoint of it."""
    like = {"config": model.config, "dtype": model.dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        made, report = make_model(partial(type(model).from_pretrained, None, state_dict=given, **like))
    except STRANGE:
        return None
    return None if any(report.values()) else made.state_dict()


def _refuse_unfit(what: str, key: str, new: Tensor, own: Tensor) -> None:
    if new.shape != own.shape:
        raise LoadError(f"{what}: {key} has the shape {list(new.shape)}, and the model's own has {list(own.shape)}")
    if new.is_meta or new.is_floating_point() != own.is_floating_point():
        raise LoadError(f"{what}: {key} is {new.dtype} on {new.device}, which cannot replace {own.dtype}")
    if not bool(new.isfinite().all()):
        raise LoadError(f"{what}: {key} has values that are not finite, as where a training has diverged")


def _why_unknown(unknown: Collection[str], own: Mapping[str, Tensor]) -> str | None:
    if any("lora_" in key or ".base_layer." in key for key in unknown):
        return "merge the adapter into the weights first, by peft's merge_and_unload or merge_adapter"
    for key in unknown:
        if wrapper := next((key.removesuffix(name) for name in own if key.endswith(f".{name}")), None):
            return f"names begin with {wrapper!r}, as a wrapper gives them: give those of the model inside"
    return None
