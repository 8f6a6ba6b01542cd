"""The proof at load: a base decodes by trees only if a few tokens come out as the model's own way has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from drafter.errors import LoadError, first_line
from drafter.target.forward import LM_HEAD_INPUT, Executor, TreeNodes
from drafter.target.kv_cache import KVCache, LayerShape
from drafter.target.packing import Packing

_MODEL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""What a model's code may raise when it is run in a way that it does not know."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""Largest difference of logits, relative to the largest logit, in fp32 and in half precision."""
_LONG = 520
"""Tokens of a text that is long enough to be read in several parts."""


class Candidate(Protocol):
    """A model that is to be a base: what the proof runs of it. See `BaseModel`."""

    model: Any
    config: Any
    name: str
    dtype: torch.dtype
    max_positions: int | None

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self, slots: int, length: int) -> KVCache: ...

    def prefill(self, cache: KVCache, slot: int, prompts: Sequence[Tensor], starts: Sequence[int] = ...) -> Tensor: ...

    def prefill_last(self, cache: KVCache, slot: int, prompt: Tensor, start: int = ...) -> tuple[Tensor, Tensor]: ...

    def verify(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class PlainRun:
    """A few tokens run the model's own way.

    Args:
        ids: `[6]` the tokens.
        logits: `[6, V]` after each of them.
        layer_shapes: What each layer caches; None for a layer that caches nothing.
    """

    ids: Tensor
    logits: Tensor
    layer_shapes: list[LayerShape | None]


@torch.inference_mode()
def run_plainly(base: Candidate) -> PlainRun:
    """Run six tokens as the model would by itself.

    Raises:
        LoadError: The model does not run with a cache.
    """
    ids = torch.arange(1, 7, device=base.device) * 7919 % base.vocab_size
    try:
        plain = base.model(input_ids=ids[None], past_key_values=DynamicCache(config=base.config), use_cache=True)
        shapes = [_layer_shape(layer) for layer in plain.past_key_values.layers]
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, error) from error
    return PlainRun(ids, plain.logits[0], shapes)


@torch.inference_mode()
def prove_tree_decoding(base: Candidate, plain: PlainRun) -> None:
    """Run the same tokens as a draft tree does, and refuse the model if the logits differ.

    A decoy node stands before the true continuation, so that a model that ignores the mask or the positions is found
    out.

    Raises:
        LoadError: The model does not run with a tree mask and a slot cache, or gives other logits.
    """
    ids, kind = plain.ids, base.model.config.model_type
    try:
        cache = base.new_cache(2, 16)
        first, hidden = base.prefill_last(cache, 0, ids[:4])
        # Root ids[4], a decoy child, and the true child ids[5].
        tokens = torch.stack([ids[4], ids[0], ids[5]])[None]
        ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]], device=base.device)
        lengths = torch.tensor([4], device=base.device)
        depths = torch.tensor([[0, 1, 1]], device=base.device)
        logits, node_hidden = base.verify(cache, TreeNodes(tokens, lengths, depths, ancestors[None], 8))
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, error) from error
    if not _alike(torch.cat([first, logits[0, [0, 2]]]), plain.logits[3:], base.dtype):
        raise LoadError(
            f"{base.name}: {kind} gives other logits with a tree mask, explicit positions and a slot cache than by "
            "itself; it cannot be a base (state-space and linear attention, ALiBi and bidirectional models cannot)"
        )
    if hidden.shape[-1] != node_hidden.shape[-1]:
        raise LoadError(f"{base.name}: the decoder's output is not the LM head's input; it cannot be a base")


@torch.inference_mode()
def attention_agrees(base: Candidate, change: Callable[[], None]) -> bool:
    """Whether two trees, and two prompts, of three and two tokens are the same before and after a change of attention.

    Args:
        base: The base, which can pack trees and prompts after the change.
        change: Makes it.
    """
    tokens = torch.arange(1, 7, device=base.device).view(2, 3) * 7919 % base.vocab_size
    lengths = torch.tensor([0, 1], device=base.device)
    depths = torch.tensor([[0, 1, 1], [0, 1, 1]], device=base.device)
    ancestors = torch.eye(3, dtype=torch.bool, device=base.device).repeat(2, 1, 1)
    ancestors[:, :, 0] = True
    real = torch.tensor([[True, True, True], [True, True, False]], device=base.device)
    prompts, starts = [tokens[0], tokens[1, :2]], [0, 1]

    def trees(packing: Packing | None) -> list[Tensor]:
        # In a cache of its own, so that it cannot find what another one has written.
        found = base.verify(base.new_cache(2, 8), TreeNodes(tokens, lengths, depths, ancestors, 4, packing))
        return [part[real] for part in found]

    cache = base.new_cache(2, 8)
    before = trees(None)
    apart = torch.cat([base.prefill(cache, row, prompts[row : row + 1], starts[row : row + 1]) for row in (0, 1)])
    change()
    try:
        after = [*trees(Packing.of(real)), base.prefill(base.new_cache(2, 8), 0, prompts, starts), *trees(None)]
    except _MODEL_ERRORS:
        return False
    expected = [*before, apart, *before]
    return all(_alike(ours, theirs, base.dtype) for ours, theirs in zip(after, expected, strict=True))


@torch.inference_mode()
def trees_agree(base: Candidate, change: Callable[[], None]) -> bool:
    """Whether trees behind a long text, a short one and none are the same before and after a change of attention.

    Args:
        base: The base.
        change: Makes it.
    """
    long = min(_LONG, (base.max_positions or 2 * _LONG) // 2)
    ids = torch.arange(1, long + 19, device=base.device) * 7919 % base.vocab_size
    lengths = torch.tensor([long, 6, 0], device=base.device)
    depths = torch.tensor([[0, 1, 1, 2]] * 3, device=base.device)
    ancestors = torch.tensor(
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]] * 3, dtype=torch.bool, device=base.device
    )
    cache = base.new_cache(3, 2 * long)
    base.prefill(cache, 0, [ids[:long]])
    base.prefill(cache, 1, [ids[long : long + 6]])
    nodes = TreeNodes(ids[-12:].view(3, 4), lengths, depths, ancestors, long + 4)
    before = base.verify(cache, nodes)
    change()
    try:
        after = base.verify(cache, nodes)
    except _MODEL_ERRORS:
        return False
    return all(_alike(ours, theirs, base.dtype) for ours, theirs in zip(after, before, strict=True))


@torch.inference_mode()
def executors_agree(base: Candidate, one: Executor, other: Executor) -> bool:
    """Whether two executors give the same numbers for two prompts, a draft tree behind each, and the prompts' ends.

    The tokens are spread over the vocabulary, and the texts are long enough that positions matter.
    """
    ids = torch.arange(1, 61, device=base.device) * 7919 % base.vocab_size
    prompts, starts = [ids[:24], ids[24:40]], [0, 0]
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]], device=base.device)
    ancestors = torch.tensor(
        [
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        ],
        dtype=torch.bool,
        device=base.device,
    )
    lengths = torch.tensor([24, 16], device=base.device)
    results = []
    for executor in (one, other):
        cache = base.new_cache(2, 40)
        hidden = [
            executor.prefill(cache, row, prompts[row : row + 1], starts[row : row + 1], (LM_HEAD_INPUT,))
            for row in (0, 1)
        ]
        nodes = TreeNodes(ids[40:48].view(2, 4), lengths, depths, ancestors, 28)
        end = executor.prefill_last(cache, 0, ids[48:], 24, (LM_HEAD_INPUT,))
        results.append([*hidden, *end, *executor.verify(cache, nodes)])
    return all(_alike(ours, theirs, base.dtype) for ours, theirs in zip(*results, strict=True))


def _does_not_run(base: Candidate, error: BaseException) -> LoadError:
    return LoadError(
        f"{base.name}: {base.model.config.model_type} does not run with a tree mask and a slot cache "
        f"({type(error).__name__}: {first_line(error)}); it cannot be a base"
    )


def _alike(logits: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    others = others.float()
    scale = others.abs().amax().clamp_min(1e-6)
    difference = (logits.float() - others).abs().amax() / scale
    return bool(difference < (_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE))


def _layer_shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
