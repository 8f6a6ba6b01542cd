"""Proof at load that tree decoding gives the same logits as the model's own way, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from drafter.errors import LoadError, first_line
from drafter.target.attention import Packing
from drafter.target.forward import LM_HEAD_INPUT, Executor, TreeNodes, prompt_nodes
from drafter.target.kv_cache import KVCache, LayerShape

_MODEL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""Errors that a model's code may raise when called in an unsupported way."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""Largest difference of logits ÷ the largest logit, in fp32 and in half precision."""
_PROMPTS, _STEPS = (11, 26), 4
"""Lengths of two prompts, and of the continuation of each. The second is longer than two windows of `PASSED` tokens."""
_TREE, _PATH = (-1, 0, 0, 2, 2), (0, 2, 4)
"""Parents in the proof's trees, and the path of the true continuation; a decoy precedes each of its nodes."""
_ROOTED, _CHAIN = (-1, 0, 0, 2), (-1, 0, 1, 2)
"""Parents in small trees."""
_LONG = 520
"""Tokens of a text that is long enough to be read in several parts."""
Forward = Callable[[KVCache, TreeNodes], tuple[Tensor | None, Tensor]]


class Candidate(Protocol):
    """Interface of a model under proof; see `BaseModel`."""

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

    def forward(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor | None, Tensor]: ...


@dataclass(frozen=True)
class PlainRun:
    """Reference: two texts `[P + 4]` run the model's own way, each by itself.

    Args:
        logits: `[P + 4, V]` of each.
        layer_shapes: Cached shape of each layer; None for a layer that caches nothing.
    """

    texts: list[Tensor]
    logits: list[Tensor]
    layer_shapes: list[LayerShape | None]


@torch.inference_mode()
def run_plainly(base: Candidate) -> PlainRun:
    """Run two texts of different lengths the model's own way.

    Raises:
        LoadError: The model does not run with a cache.
    """
    room = (base.max_positions or _PROMPTS[1] + _STEPS) - _STEPS
    lengths = [max(1, min(length, room)) + _STEPS for length in _PROMPTS]
    ids = 1 + torch.arange(1, sum(lengths) + 1, device=base.device) * 7919 % max(base.vocab_size - 2, 1)
    texts: list[Tensor] = list(ids.split(lengths))
    try:
        logits, layers = _logits_and_layers(base, texts)
        counting = base.device.type == "meta"  # where sizes are counted, without numbers
        if not counting and not all(some.isfinite().all() for some in logits):  # such tokens prove nothing
            alone = base.model(input_ids=ids[:, None]).logits
            if (finite := ids[alone.isfinite().all(-1)[:, 0]]).numel():
                texts = list(finite.repeat(len(ids))[: len(ids)].split(lengths))
                logits, layers = _logits_and_layers(base, texts)
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, error) from error
    return PlainRun(texts, logits, [_layer_shape(layer) for layer in layers])


def _logits_and_layers(base: Candidate, texts: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the logits `[P, V]` of each text, and the layers of the cache."""
    logits = []
    for text in texts:
        plain = base.model(input_ids=text[None], past_key_values=DynamicCache(config=base.config), use_cache=True)
        logits.append(plain.logits[0])
    return logits, plain.past_key_values.layers


@torch.inference_mode()
def prove_tree_decoding(base: Candidate, plain: PlainRun) -> None:
    """Run the same texts as the engine does, and refuse the model if the logits differ.

    Two rows of different lengths, with a free slot between them, are prefilled and verified together, by a draft tree
    and then plainly. Decoys before the true continuation expose a model that ignores the mask or the positions.

    Raises:
        LoadError: The model does not run with a tree mask and a slot cache, or gives other logits.
    """
    kind = base.model.config.model_type
    try:
        found, widths = _run_as_engine(base, plain.texts)
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, error) from error
    for logits, expected in zip(found, plain.logits, strict=True):
        if not _alike(logits, expected[-len(logits) :], base.dtype):
            raise LoadError(
                f"{base.name}: {kind} gives other logits with a tree mask, explicit positions and a slot cache than by "
                "itself; it cannot be a target model (state-space and linear attention, ALiBi, bidirectional models, "
                "and such that make windows of their own cannot)"
            )
    if len(widths) > 1:
        raise LoadError(f"{base.name}: the decoder's output is not the LM head's input; it cannot be a target model")


def _run_as_engine(base: Candidate, texts: list[Tensor]) -> tuple[list[Tensor], set[int]]:
    """Return the last logits `[5, V]` of each text, in slots 0 and 2, and the widths of the hidden states."""
    slots, device = (0, 2), base.device
    prompts = [len(text) - _STEPS for text in texts]
    cache = base.new_cache(3, max(prompts) + _STEPS + len(_TREE))
    free = cache.length - len(_TREE)
    ends: list[Tensor] = []
    widths: set[int] = set()
    for slot, text, length in zip(slots, texts, prompts, strict=True):
        half = length // 2
        if half:
            widths.add(base.prefill(cache, slot, [text[:half]]).shape[-1])
        end, hidden = base.prefill_last(cache, slot, text[half:length], half)
        ends.append(end)
        widths.add(hidden.shape[-1])

    def verify(trees: list[Tensor], depths: list[int], ancestors: Tensor, lengths: list[int]) -> Tensor:
        nodes = TreeNodes(
            torch.stack([trees[0], trees[0][:1].expand(len(depths)), trees[1]]),
            torch.tensor([lengths[0], free, lengths[1]], device=device),
            torch.tensor([depths] * 3, device=device),
            ancestors.to(device).expand(3, -1, -1),
            max(lengths) + len(depths),
            full=free,
        )
        logits, hidden = base.verify(cache, nodes)
        widths.add(hidden.shape[-1])
        return logits[list(slots)]

    next_ones = [text[-_STEPS:] for text in texts]
    decoyed = [torch.stack([some[0], some[3], some[1], some[0], some[2]]) for some in next_ones]
    drafted = verify(decoyed, [0, 1, 1, 2, 2], _ancestors(_TREE), prompts)[:, list(_PATH)]
    cache.commit(
        torch.tensor([prompts[0], free, prompts[1]], device=device),
        torch.tensor([_PATH, (0, 0, 0), _PATH], device=device),
    )
    after = [length + len(_PATH) for length in prompts]
    plain = verify([some[3:] for some in next_ones], [0], torch.ones(1, 1, dtype=torch.bool), after)
    return [torch.cat(parts) for parts in zip(ends, drafted, plain, strict=True)], widths


@torch.inference_mode()
def attention_agrees(base: Candidate, change: Callable[[], None]) -> bool:
    """Compare two trees, and two prompts, of three and two tokens before `change` and, packed, after it."""
    tokens = torch.arange(1, 7, device=base.device).view(2, 3) * 7919 % base.vocab_size
    lengths = torch.tensor([0, 1], device=base.device)
    depths = torch.tensor([[0, 1, 1], [0, 1, 1]], device=base.device)
    ancestors = torch.eye(3, dtype=torch.bool, device=base.device).repeat(2, 1, 1)
    ancestors[:, :, 0] = True
    real = torch.tensor([[True, True, True], [True, True, False]], device=base.device)
    prompts, starts = [tokens[0], tokens[1, :2]], [0, 1]

    def trees(packing: Packing | None) -> list[Tensor]:
        # In a new cache, so that no earlier run's states can be found there.
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
    return _all_alike(after, [*before, apart, *before], base.dtype)


@torch.inference_mode()
def trees_agree(base: Candidate, change: Callable[[], None]) -> bool:
    """Compare trees, and single nodes, behind a long, short and empty text before and after a change of attention."""
    lengths = (min(_LONG, (base.max_positions or 2 * _LONG) // 2), 6, 0)
    before = _answers(base, base.forward, lengths)
    change()
    try:
        after = _answers(base, base.forward, lengths)
    except _MODEL_ERRORS:
        return False
    return _all_alike(after, before, base.dtype)


@torch.inference_mode()
def executors_agree(base: Candidate, one: Executor, other: Executor) -> bool:
    """Compare two executors on two prompts, trees and single nodes behind each, and the end of a prompt."""
    ours, theirs = (_answers(base, executor.forward, (24, 16)) for executor in (one, other))
    return _all_alike(ours, theirs, base.dtype)


def _answers(base: Candidate, forward: Forward, lengths: Sequence[int]) -> list[Tensor]:
    """Run texts of these lengths, trees and single nodes behind each, and the end of the first text."""
    # The tokens are spread over the vocabulary.
    ids = torch.arange(1, sum(lengths) + 4 * len(lengths) + 13, device=base.device) * 7919 % base.vocab_size
    *texts, drafted, end = ids.split([*lengths, 4 * len(lengths), 12])
    cache = base.new_cache(len(lengths), max(lengths) + 16)
    last = (LM_HEAD_INPUT,)
    answers = [forward(cache, prompt_nodes(row, [text], [0], last))[1] for row, text in enumerate(texts) if len(text)]
    trees = [_ROOTED, _CHAIN, _ROOTED][: len(lengths)]
    ancestors = torch.stack([_ancestors(tree) for tree in trees]).to(base.device)
    depths = ancestors.sum(2) - 1
    before = torch.tensor(lengths, device=base.device)
    for size in (4, 1):
        tokens = drafted.view(-1, 4)[:, :size]
        nodes = TreeNodes(tokens, before, depths[:, :size], ancestors[:, :size, :size], max(lengths) + 4)
        answers += [part for part in forward(cache, nodes) if part is not None]
    found = forward(cache, prompt_nodes(0, [end], [lengths[0]], last, logits=True))
    return [*answers, *(part for part in found if part is not None)]


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Return `TreeNodes.ancestors` `[N, N]` of one tree."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
    return ancestors


def _all_alike(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return all(_alike(one, other, dtype) for one, other in zip(ours, theirs, strict=True))


def _does_not_run(base: Candidate, error: BaseException) -> LoadError:
    return LoadError(
        f"{base.name}: {base.model.config.model_type} does not run with a tree mask and a slot cache "
        f"({type(error).__name__}: {first_line(error)}); it cannot be a target model"
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
