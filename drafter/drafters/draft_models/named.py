"""Draft models and stacks of them by name."""

from __future__ import annotations

from collections.abc import Callable

from drafter.base.causal_lm import BaseModel
from drafter.base.loading import load_base, load_tokenizer, pick_device
from drafter.drafters.contract import Drafter
from drafter.drafters.draft_models.model_drafter import ModelDrafter
from drafter.drafters.draft_models.same_tokens import difference
from drafter.drafters.draft_models.stacked import LOWER_NODES, StackedDrafter
from drafter.drafters.names import kind_and_rest, merged_names, model_and_device, stack_levels
from drafter.errors import LoadError


def load_draft_model(name: str, base: BaseModel) -> BaseModel:
    """Load a draft model for `base`, with the base's dtype if it is on the base's device.

    Args:
        name: `PATH_OR_HUB_ID` or `PATH_OR_HUB_ID@DEVICE`; by default it is on the base's device.
        base: The base that it drafts for.

    Raises:
        LoadError: It cannot be loaded, or has another tokeniser than the base.
    """
    path, device = model_and_device(name)
    if not path:
        raise LoadError("drafter model: has no name: use model:PATH_OR_HUB_ID")
    different = difference(load_tokenizer(path), load_tokenizer(base.name))
    if different is not None:
        raise LoadError(
            f"draft model {path!r} has another tokenizer than {base.name}: {different}; use a model of the same family"
        )
    target = base.device if device is None else pick_device(device)
    return load_base(path, dtype=base.dtype if target == base.device else "auto", device=target)


def load_model_drafter(name: str, base: BaseModel, nodes: int) -> Drafter:
    """Load the drafter `model:NAME`; see `load_draft_model`.

    Raises:
        LoadError: The model cannot be used.
    """
    return ModelDrafter(load_draft_model(name, base), base, nodes)


def load_stack(levels: str, base: BaseModel, nodes: int, load: Callable[[str, int], Drafter]) -> Drafter:
    """Load the drafter `stack:LEVELS`.

    Args:
        levels: `LOWER>model:A`, or more levels, from the lowest on; those above the lowest are draft models.
        base: The base that they draft for.
        nodes: Draft nodes of the largest tree that the base gets.
        load: Loads the drafter of a name for a number of draft nodes.

    Raises:
        LoadError: A level is missing, or cannot be used.
    """
    lower, *models = stack_levels(levels)
    kinds = [kind_and_rest(model) for model in models]
    one_each = all(kind == "model" and rest for kind, rest in kinds) and all(len(merged_names(m)) == 1 for m in models)
    if not lower or not models or not one_each:
        raise LoadError(f"no stack {levels!r}: use stack:LOWER>model:A, with one model in each level above the lowest")
    counts = [nodes * LOWER_NODES ** (len(models) - place) for place in range(len(models) + 1)]
    drafter = load(lower, counts[0])
    for (_, name), count in zip(kinds, counts[1:], strict=True):
        drafter = StackedDrafter(drafter, load_draft_model(name, base), base, count)
    return drafter
