"""Layouts in which others publish draft heads: how to recognise, read and write them, and checks that all share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from drafter.drafters.target import Target
from drafter.errors import LoadError, shown
from drafter.hub import hub_file
from drafter.plugins import resolved
from drafter.target_model.weights import INDEX, WEIGHTS, read_weight_map, skeleton

Json = Mapping[str, Any]
Weights = dict[str, Tensor]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHOWN = 3
_NOTES = words(
    "_attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout "
    "attn_implementation auto_map base_model_name_or_path bos_token_id chunk_size_feed_forward dtype eos_token_id "
    "id2label initializer_range is_decoder is_encoder_decoder label2id license max_position_embeddings model_type "
    "output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict torch_dtype "
    "transformers_version use_cache version"
)
"""Keys of any `config.json` that say nothing of what is computed in drafting."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublicHead:
    """A published head, converted: weights `tensors` by our names, and the fields of its configuration.

    `algorithm` is a key of `HEADS`; `made_for` is the hub id or path of its target model, if known.
    """

    layout: str
    algorithm: str
    fields: dict[str, Any]
    tensors: Weights
    made_for: str | None


@dataclass(frozen=True)
class TargetOfExport:
    """The target model as an exported head names it.

    Args:
        max_positions: Longest sequence, if its configuration says.
        embeddings: `[V, d]` token embeddings. An EAGLE-3 head has a copy: without it speculators 0.9 may initialise
            them randomly, though vLLM would take the target model's.
    """

    name: str
    architectures: Sequence[str]
    max_positions: int | None = None
    embeddings: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """A layout that others publish heads in.

    Args:
        algorithm: A key of `HEADS`.
        keys: Those of a `config.json` in this layout that `read` reads; see `refuse_unknown`.
        recognises: Tells whether a `config.json` is in this layout.
        read: Makes a `PublicHead` of a name for messages, a configuration, weights and the target model, or raises
            `LoadError`.
        check_exportable: Raises `LoadError` for a configuration that the layout cannot hold.
        export: Returns the layout's configuration and weights for a head; None if heads are only read.
    """

    algorithm: str
    keys: Collection[str]
    recognises: Callable[[Json], bool]
    read: Callable[[str, Json, Weights, Target], PublicHead]
    check_exportable: Callable[[Any], None] = lambda config: None
    export: Callable[[Any, Weights, TargetOfExport], tuple[dict[str, Any], Weights]] | None = None


def public_config(file: Path) -> Json | None:
    """Return a `config.json` if it is a published head's; None otherwise."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, RecursionError, ValueError):
        return None  # the loader of our own format reports the error
    if not isinstance(config, dict) or "algorithm" in config:
        return None
    return config if _layout_of(config) is not None or "speculators_model_type" in config else None


def read_public(name: str, config: Json, tensors: Weights, base: Target) -> PublicHead:
    """Convert a published head; raise `LoadError` if it is of another target model or of an unsupported kind."""
    if (layout := _layout_of(config)) is None:
        kind = config["speculators_model_type"]
        raise LoadError(f"draft head {name!r} is a speculators head of kind {shown(kind)}, which no method reads")
    refuse_unknown(name, config, layout.keys)
    found = layout.read(name, config, tensors, base)
    made_for = found.made_for
    if made_for is not None and not isinstance(made_for, str):
        raise LoadError(f"draft head {name!r}: its config.json names as its model {shown(made_for)}, which is no text")
    if made_for and Path(made_for).name.lower() != Path(base.name).name.lower():
        _log.warning(
            "draft head %r was made for %r and has the sizes of %r, which it drafts for", name, made_for, base.name
        )
    return found


def _layout_of(config: Json) -> Layout | None:
    return next((one for one in resolved("layouts").values() if one.recognises(config)), None)


def number(name: str, config: Json, key: str, default: float | None = None) -> int | float:
    """Return a number of a published configuration; raise `LoadError` if it is none, or missing without a default."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LoadError(f"draft head {name!r}: its config.json says {key} = {shown(value)}, which is no number")
    return value


def count(name: str, config: Json, key: str, default: int | None = None) -> int:
    """Return a positive integer of a published configuration; raise `LoadError` as `number` does."""
    value = number(name, config, key, default)
    if not isinstance(value, int) or value < 1:
        raise LoadError(
            f"draft head {name!r}: its config.json says {key} = {shown(value)}, which is no integer above 0"
        )
    return value


def group(name: str, config: Json, key: str) -> Json:
    """Return a section of a published configuration, empty if missing; raise `LoadError` if it is no mapping."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LoadError(f"draft head {name!r}: its config.json says {key} = {shown(value)}, which are no named values")
    return value


def refuse_unknown(name: str, config: Json, keys: Collection[str], section: str = "") -> None:
    """Raise `LoadError` for what a published configuration, or a section of it, says beside these keys.

    It may say that the head was trained to draft otherwise, which no tensor would show. Null says nothing.
    """
    said = {key for key, value in config.items() if value is not None}
    if unknown := sorted(f"{section}{key}" for key in said - set(keys) - _NOTES):
        raise LoadError(
            f"draft head {name!r}: its config.json has {', '.join(map(shown, unknown[:_SHOWN]))}, which may mean that "
            "it drafts in a way that is not known here: take out what changes nothing"
        )


def refuse_others(name: str, config: Json, wanted: Mapping[str, Any], section: str = "") -> None:
    """Raise `LoadError` for a key of a published configuration with another value than that which can be run."""
    for key, value in wanted.items():
        if (said := config.get(key)) is not None and said != value:
            raise LoadError(f"draft head {name!r} has {section}{key} = {shown(said)}, and only {value!r} can be run")


def refuse_unfit(name: str, needed: Sequence[str], tensors: Weights, unread: Collection[str] = ()) -> None:
    """Raise `LoadError` for the first `needed` name that is not there, or tensor that is not needed nor `unread`."""
    if missing := [one for one in needed if one not in tensors]:
        raise LoadError(f"draft head {name!r}: tensor {missing[0]!r} is missing from its weights")
    if unknown := sorted(set(tensors) - {*needed, *unread}):
        raise LoadError(
            f"draft head {name!r} has a tensor {unknown[0]!r}, which no head of its kind that can be run has"
        )


def refuse_other_base(name: str, base: Target, made_for: str | None, sizes: Mapping[str, int]) -> None:
    """Raise `LoadError` if a head of these `sizes` (`hidden_size`, `vocab_size`) does not fit the target model."""
    for what, size in sizes.items():
        if size != getattr(base, what):
            whose = f"the target model {made_for!r}" if made_for else "another target model"
            raise LoadError(
                f"draft head {name!r} belongs to {whose}, not to {base.name!r}: its {what} is {size:,}, and "
                f"that of the target model {getattr(base, what):,}; load the target model that it was trained for"
            )


def base_embeddings(model: str, config: Any, *, trust_remote_code: bool = False) -> Tensor | None:
    """Read a target model's token embeddings `[V, d]` without the rest of it; None if its files lack them."""
    empty = skeleton(config, trust_remote_code=trust_remote_code)
    wanted = empty.get_input_embeddings().weight
    name = next((name for name, one in empty.named_parameters() if one is wanted), None)
    index = _file(model, INDEX)
    shard = WEIGHTS if index is None else read_weight_map(model, index).get(name or "")
    file = None if shard is None else _file(model, shard)
    if file is None or name is None:
        return None
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 - it is no mapping


def _file(model: str, name: str) -> Path | None:
    if (folder := Path(model).expanduser()).is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return hub_file(model, name)
    except (OSError, ValueError):
        return None
