"""Rank 0 of a model that is split: it alone has an engine, and whatever that does with the model the others do, too.

Scheduler, budget, drafters, guides and clocks are here only. So nothing that depends on time or on a race can differ
between ranks: they get calls of the model and of its caches, one after the other, with all their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafter.errors import LoadError, one_line
from drafter.gguf_files import gguf_file
from drafter.ranks.messages import EMBEDDING, FIRST_CACHE, HEAD, MODEL, Call, Message, Place, Witness, send
from drafter.ranks.processes import Ranks
from drafter.target_model.architecture import state_layers
from drafter.target_model.cache import Blocks, TargetCache
from drafter.target_model.formats import scheme_name, scheme_of
from drafter.target_model.loading import Example, load_base, load_config
from drafter.target_model.model import BaseModel

T = TypeVar("T")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_RECURRENT = ("linear_attn", "mamba", "mixer")  # in names of layers whose states are kept whole
_BEGINNING = 200  # characters by which errors are told apart
_OF_MODEL = ("allow_packing", "first_layers", "forward", "new_cache", "prefill", "prefill_last", "verify")
_WHOLE = ("lm_head_bias", "lm_head_weight")  # put together of all ranks' parts
_OF_CACHE = ("clear", "commit", "copy", "enter", "move", "scrub", "zero")
_OF_BLOCKS = ("release", "reserve", "swap")
"""These are sent with the next call of another kind: they come for each row of a step."""


def load_on_ranks(
    size: int,
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    adapter: str | Path | None = None,
    dequantize: bool = False,
    eyes: Example | None = None,
    on_stage: Callable[[str], None],
    **loading: Any,
) -> BaseModel:
    """Load a model in this process, or start the other `size` - 1 ranks and load it together with them.

    Raises:
        LoadError: As `load_base`, or the model or a setting does not go with several ranks.
    """
    on_each: dict[str, Any] = {"device": device, **loading}
    alone: dict[str, Any] = {"device_map": device_map, "adapter": adapter, "dequantize": dequantize}
    if size == 1:
        return load_base(name, eyes=eyes, on_stage=on_stage, **on_each, **alone)
    if given := [setting for setting, value in alone.items() if value not in (None, False)]:
        raise LoadError(f"{given[0]} and tensor_parallel_size {size} do not go together: leave one of them out")
    name = os.path.expanduser(name)
    _refuse_whole(name, size, trust_remote_code=loading["trust_remote_code"])
    on_stage(f"starting {size - 1} more {'process' if size == 2 else 'processes'} for the model")
    ranks = Ranks(size, name, device, on_each)
    try:
        base = load_base(name, eyes=eyes, ranks=size, on_stage=on_stage, **on_each)
    except Exception as error:
        failure = str(ranks.failure(error))
        ranks.close()
        # Where another rank has ended, an error here may be what came of that.
        if isinstance(error, LoadError) and one_line(error)[:_BEGINNING] in failure:
            raise
        raise LoadError(f"model {name!r} cannot be split among {size} processes: {failure}") from error
    base.others = ranks
    refuse_split_eyes(base)
    return Leader(ranks, base).base


def _refuse_whole(name: str, size: int, *, trust_remote_code: bool) -> None:
    """Raise `LoadError` for a model that cannot be split among `size` ranks."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    text, asked = config.get_text_config(decoder=True), f"tensor_parallel_size {size}"
    scheme = scheme_of(config)
    if scheme is not None or gguf_file(name) is not None:
        stored = "GGUF" if scheme is None else scheme_name(scheme)
        raise LoadError(f"model {name!r} has {stored} weights, which are not split: leave {asked} out")
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan or (state_layers(text) and any(part in rule for rule in plan for part in _RECURRENT)):
        why = "would split the recurrent layers of" if plan else "has no plan by which to split"
        raise LoadError(
            f"model {name!r}: transformers {why} {text.model_type}: leave {asked} out (device_map puts layers on "
            "different GPUs)"
        )
    for heads in _HEADS:
        counts = getattr(text, heads, None) or 0
        for one in counts if isinstance(counts, list | tuple) else [counts]:
            if one % size:
                raise LoadError(f"model {name!r} cannot be split: its {heads} {one} is no multiple of {asked}")


def refuse_split_eyes(base: BaseModel) -> None:
    """Read no images where a part of the vision tower is on each rank: rank 0 alone looks at images."""
    parts = (base.decoder, base.model.get_input_embeddings(), base.model.get_output_embeddings())
    texts = {id(parameter) for part in parts for parameter in part.parameters()}
    split = [name for name, one in base.model.named_parameters() if isinstance(one, DTensor) and id(one) not in texts]
    if split and base.sight is not None:
        base.sight, base.blind = None, f"{base.name} reads no images here: its {split[0]} is split by transformers"


class Leader:
    """Has the other ranks do what is done with `base`, the target model as an engine and its drafters get it."""

    def __init__(self, ranks: Ranks, base: BaseModel) -> None:
        self._ranks, self._numbers = ranks, count(FIRST_CACHE)
        self._waiting: list[Call] = []
        self._together = False  # a call that all ranks do is under way
        head = base.model.get_output_embeddings()
        self._witness = Witness(head)
        self._checksum: Tensor | None = None  # its, before the call that is under way
        # Draft heads and the model's eyes call them, too.
        for number, module in ((EMBEDDING, base.model.get_input_embeddings()), (HEAD, head)):
            if isinstance(module.weight, DTensor):
                module.forward = partial(self._module, number, module.forward)
        self.base = cast(BaseModel, _Shared(self, Place(MODEL), base, _OF_MODEL, _WHOLE))

    def do(self, call: Call, work: Callable[[], T]) -> T:
        """Have the others do a call, and do the same here by `work`.

        Raises:
            LoadError: What `work` raises: the model does not go on.
            EngineError: A rank has ended, or the call failed here and may be under way elsewhere.
        """
        self._waiting.append(call)
        try:
            if call.name not in _OF_BLOCKS:
                calls, self._waiting = self._waiting, []
                send(Message(calls, self._checksum), _place_of, self._ranks.send)
            self._together = True
            if call.target.number != HEAD:  # whose call has been noted; others were rank 0's alone, as of draft heads
                self._witness.checksum = self._checksum
            with torch.no_grad():  # as there: with gradients transformers would do other calls between ranks
                return work()
        except LoadError:
            raise
        except Exception as error:
            raise self._ranks.failure(error) from error
        finally:
            self._together, self._checksum = False, self._witness.checksum

    def shared(self, cache: TargetCache) -> TargetCache:
        """Return a cache that the others have made, too, for an engine."""
        return cast(TargetCache, _Shared(self, Place(next(self._numbers)), cache, _OF_CACHE))

    def _module(self, number: int, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a layer of which each rank has a part, together with the others, unless it is a part of another call."""
        if self._together:
            return forward(*args)
        return self.do(Call(Place(number), "__call__", args, {}), partial(forward, *args))


class _Shared:
    """An object that all ranks have. Its `methods` are called on all, and the other attributes are rank 0's.

    Args:
        whole: Attributes for which all ranks must be asked.
    """

    def __init__(
        self, leader: Leader, place: Place, own: Any, methods: tuple[str, ...], whole: tuple[str, ...] = ()
    ) -> None:
        self._leader, self.place, self.own, self._methods, self._whole = leader, place, own, methods, whole

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return partial(self._call, name)
        if name in self._whole:
            return self._leader.do(Call(self.place, name, None, {}), lambda: getattr(self.own, name))
        found = getattr(self.own, name)
        if isinstance(found, Blocks) and not found.in_order:  # those that are never change
            return _Shared(self._leader, Place(self.place.number, name), found, _OF_BLOCKS)
        return found

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        here = partial(getattr(self.own, name), *map(_own, args), **{key: _own(one) for key, one in kwargs.items()})
        found = self._leader.do(Call(self.place, name, args, kwargs), here)
        return self._leader.shared(found) if isinstance(found, TargetCache) else found


def _own(value: Any) -> Any:
    return value.own if isinstance(value, _Shared) else value


def _place_of(value: object) -> Place | None:
    return value.place if isinstance(value, _Shared) else None
