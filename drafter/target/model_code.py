"""The target model's forward by its own code, unforked, optionally compiled: any model, device and precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drafter import devices
from drafter.target.architecture import attention_kinds, max_positions, whole_layers
from drafter.target.attention import (
    CommittedLayers,
    Prefix,
    PrefixAttention,
    additive,
    folded,
    parts_of,
    tree_attention_mask,
)
from drafter.target.forward import DecoderLayers, TreeNodes
from drafter.target.kv_cache import KVCache
from drafter.target.packing import Packing

F = TypeVar("F", bound=Callable[..., Any])

_VARIANTS = 64
"""Compiled variants kept, over all engine sizes in a process; past the limit they run uncompiled."""


def compiled(forward: F) -> F:
    """Compile a forward. Compilation, and its errors, come at the first calls for one and several rows and nodes."""
    options: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _VARIANTS
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    return torch.compile(forward, dynamic=True, **options)  # type: ignore[return-value]


_LARGEST_TREE = 128
"""Larger trees are chunks of a prompt, whose mask is larger than the KV cache that folding saves."""
_USUAL_TREE = 32
"""Tree size for which a compiled forward splits a row's positions, as one variant serves all trees."""
Forward = Callable[[KVCache, TreeNodes], tuple[Tensor, Tensor]]


class ModelCode:
    """`Executor` that calls a transformers model.

    Args:
        model: The causal LM, on its device(s).
        decoder: The model without its LM head.
        layers: The decoder's.
        config: The decoder's.
        device: Device of token ids and results.

    Attributes:
        query_groups: Query heads per KV head in the masks that the layers get; see `tree_attention`.
        prefix_attention: Kernel that reads committed positions in `whole` layers; None where attention is masked.
        whole: Layers without window or chunks.
        packs: The layers take packed nodes.
    """

    def __init__(
        self, model: Any, decoder: nn.Module, layers: DecoderLayers, config: Any, device: torch.device
    ) -> None:
        self._model, self._decoder, self._layers, self._device = model, decoder, layers, device
        # Read once: transformers' configurations are slow to ask.
        self._dtype: torch.dtype = model.dtype
        self._max_positions = max_positions(config)
        self._kinds = attention_kinds(config)
        takes = inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.query_groups = 1
        self.prefix_attention: PrefixAttention | None = None
        self.whole = whole_layers(config)
        self.packs = False
        self._head_input: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)
        self._verify: Forward = self._run

    def compile(self) -> None:
        self._verify = compiled(self._run)

    def verify(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Run tree nodes, with a `packing` only after `BaseModel.allow_packing` returns True; see `Executor.verify`."""
        self._layers.watch(nodes.hidden_layers)
        return self._verify(cache, nodes)

    def prefill(
        self,
        cache: KVCache,
        slot: int,
        prompts: Sequence[Tensor],
        starts: Sequence[int],
        hidden_layers: tuple[int, ...],
    ) -> Tensor:
        """Run prompts, several only after `BaseModel.allow_packing` returned True; see `Executor.prefill`."""
        self._layers.watch(hidden_layers)
        # The decoder without its LM head: these logits are never needed.
        last = self._decoder(**self._prompt_inputs(cache, slot, prompts, starts)).last_hidden_state
        return self._layers.take(hidden_layers, last, self._device)[0]

    def prefill_last(
        self, cache: KVCache, slot: int, prompt: Tensor, start: int, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        self._layers.watch(hidden_layers)
        found: list[Tensor] = []
        # The model hands out what its LM head makes of these, and may do something to the logits after that.
        hook = self._decoder.register_forward_hook(lambda *call: found.append(call[2].last_hidden_state))
        try:
            logits = self._model(**self._prompt_inputs(cache, slot, [prompt], [start]), **self._last_logits).logits
        finally:
            hook.remove()
            self._head_input = None
        return logits[0, -1:].to(self._device), self._layers.take(hidden_layers, found[0], self._device)[0]

    def exit_early(self, cache: KVCache, nodes: TreeNodes, layers: int, first: int) -> Tensor:
        packing = nodes.packing if self.packs else None
        with self._layers.only_first(layers):
            inputs = self._inputs(cache, 0, replace(nodes, packing=packing), first=first)
            last: Tensor = self._decoder(**inputs).last_hidden_state.to(self._device)
        return last if packing is None else packing.unpack(last)

    def read_early(self, tokens: Tensor, layers: int) -> Tensor:
        with self._layers.only_first(layers):
            last: Tensor = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return last.to(self._device)

    def forget_head_input(self) -> None:
        """Drop the head input kept from an LM head call outside of a forward."""
        self._head_input = None

    def _run(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        inputs, packing = self._tree_inputs(cache, nodes), nodes.packing
        logits = self._model(**inputs).logits.to(self._device)
        head_input, self._head_input = self._head_input, None
        assert head_input is not None
        hidden = self._layers.take(nodes.hidden_layers, head_input, self._device)
        return (logits, hidden) if packing is None else (packing.unpack(logits), packing.unpack(hidden))

    def _prompt_inputs(
        self, cache: KVCache, slot: int, prompts: Sequence[Tensor], starts: Sequence[int]
    ) -> dict[str, Any]:
        """Treat prompts as trees without branches."""
        counts = [len(prompt) for prompt in prompts]
        rows, longest, device = len(counts), max(counts), self._device
        tokens = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        lengths = devices.send(torch.tensor(starts), device)
        depths = torch.arange(longest, device=device).expand(rows, -1)
        ancestors = torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        kv_length = max(start + count for start, count in zip(starts, counts, strict=True))
        packing = Packing.of_counts(counts, device) if rows > 1 else None
        return self._inputs(cache, slot, TreeNodes(tokens, lengths, depths, ancestors, kv_length, packing))

    def _tree_inputs(self, cache: KVCache, nodes: TreeNodes) -> dict[str, Any]:
        """Read in two parts where a kernel reads committed positions to their own length."""
        attend, rows = self.prefix_attention, len(nodes.tokens)
        # Blocks are not in order, a tree larger than these has no mask for query heads that share a KV head, and the
        # keys of nodes that were run before are in the cache alone.
        large = nodes.tokens.shape[1] > _LARGEST_TREE
        # To compare the cache's sizes would be a guard of a compiler, and torch 2.11's cannot name sizes of objects.
        if attend is None or not cache.in_order or large or nodes.follows:
            return self._inputs(cache, 0, nodes)
        layers = cache.layers()
        size = nodes.tokens.shape[1]
        if torch.compiler.is_compiling():  # which has one variant for one row, or node, and one for all other numbers
            rows, size = rows if rows == 1 else cache.slots, size if size == 1 else _USUAL_TREE
        lengths = nodes.lengths
        if nodes.full is not None:
            lengths = torch.where(lengths < nodes.full, lengths, 0)
        parts = parts_of(rows, layers[0][0].shape[1], size * self.query_groups, cache.length)
        queries, single = nodes.tokens.shape[1] * self.query_groups, nodes.tokens.shape[1] == 1
        if single:
            lengths = lengths + 1  # the node's own position is written before it is read
            if self.query_groups > 1:
                parts, queries = 1, 1
        prefix = Prefix.of(lengths, cache.length, parts, attend, queries, some=single)
        return self._inputs(cache, 0, nodes, CommittedLayers(layers, self.whole, prefix, all_seen=single))

    def _inputs(
        self, cache: KVCache, slot: int, nodes: TreeNodes, committed: CommittedLayers | None = None, first: int = 0
    ) -> dict[str, Any]:
        """Return the model's inputs for the nodes from `first` on; those before have been run."""
        tokens, lengths, packing = nodes.tokens[:, first:], nodes.lengths[:, None], nodes.packing
        groups = self.query_groups if tokens.shape[1] <= _LARGEST_TREE else 1
        masks = {
            kind: self._mask(nodes, window, chunk, groups, first, in_parts=committed is not None)
            for kind, (window, chunk) in self._kinds.items()
        }
        positions = lengths + nodes.depths[:, first:]
        if self._max_positions is not None:
            # Nodes past the end, and those of empty slots, are never emitted; but a learned position table must not be
            # read past its end, and some models scale all positions by the largest.
            positions = positions.clamp_max(self._max_positions - 1)
        places = lengths + torch.arange(first, nodes.tokens.shape[1], device=tokens.device)
        inputs = {
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": cache.view(
                slot, places, nodes.kv_length, packing, apart=() if committed is None else committed.whole
            ),
            "use_cache": True,
        }
        if committed is not None:
            inputs["committed"] = committed
        if packing is None:
            return inputs | {"input_ids": tokens, "position_ids": positions}
        return inputs | {"input_ids": packing.pack(tokens), "position_ids": packing.pack(positions), "packing": packing}

    def _mask(
        self, nodes: TreeNodes, window: int | None, chunk: int | None, groups: int, first: int, *, in_parts: bool
    ) -> Tensor:
        """Return the mask `[B, 1, G · N, S]` of the N nodes from `first` on; S is N where attention is in two parts."""
        if in_parts and window is None and chunk is None:
            if nodes.tokens.shape[1] == 1:
                return nodes.ancestors[:, None]  # nobody reads it, but without one the model would make its own
            # A GPU's kernels want rows of masks to begin at a multiple of eight.
            size = nodes.ancestors.shape[2]
            padded = nn.functional.pad(nodes.ancestors, (0, -size % 8))
            return folded(additive(padded, self._dtype), groups)[..., :size]
        seen = tree_attention_mask(
            nodes.lengths, nodes.depths, nodes.ancestors[:, first:], nodes.kv_length, window=window, chunk=chunk
        )
        return folded(additive(seen, self._dtype), groups)

    def _keep_head_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0]
