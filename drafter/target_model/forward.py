"""Forwards of the target model: their inputs, the contract of executors, and the model's own code as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafter.errors import LoadError
from drafter.target_model.architecture import attention_kinds, maskless_kinds, max_positions, whole_layers
from drafter.target_model.attention import (
    CommittedLayers,
    Prefix,
    PrefixAttention,
    additive,
    folded,
    parts_of,
    tree_attention_mask,
)
from drafter.target_model.cache import TargetCache
from drafter.target_model.kv_cache import KVCache, cache_name
from drafter.target_model.nodes import LM_HEAD_INPUT, Nodes, PromptNodes, TreeNodes
from drafter.target_model.sight import Features, call_of, called_with

_VARIANTS = 64  # compiled variants kept, over all engine sizes in a process; past the limit they run uncompiled
_LARGEST_TREE = 128  # larger trees are chunks of a prompt, whose mask is larger than the KV cache that folding saves
_USUAL_TREE = 32  # tree size for which a compiled forward splits a row's positions, as one variant serves all trees


class Executor(Protocol):
    """Runs forwards of the target model over a KV cache. All executors give the same tokens."""

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]:
        """Run nodes; write their state behind that of the committed positions.

        A cache of the first layers alone (early exit) runs these, the final norm and the LM head.

        Returns:
            Logits `[B, N, V]` and hidden states `[B, N, K · d]`, undefined but finite in padding. Of prompts
            the logits `[keep, V]` at the end of the only one and hidden states `[ΣP, K · d]`. None where no logits are
            asked for.
        """

    def windows_up_to(self, longest: int) -> AbstractContextManager[None]:
        """Shorten layers' windows to `longest` tokens within a `with` block, so that short texts pass them."""


class DecoderLayers:
    """Access to the outputs of a decoder's `count` layers, and to its first layers alone. `name` is for messages."""

    def __init__(self, decoder: nn.Module, count: int, name: str) -> None:
        self._owner, self._attribute, self._name, self.count = decoder, "", name, count
        for path, module in decoder.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                owner, _, self._attribute = path.rpartition(".")
                self._owner = decoder.get_submodule(owner)
                break
        self._outputs: dict[int, Tensor] = {}
        self._watched: set[int] = set()
        self._shortened: dict[int, nn.ModuleList] = {}

    @property
    def modules(self) -> nn.ModuleList:
        """The layers; raises `LoadError` if they cannot be found in this model."""
        if not self._attribute:
            raise LoadError(f"{self._name}: its layers cannot be told apart, so no drafter can read or run single ones")
        layers = getattr(self._owner, self._attribute)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def watch(self, indices: Sequence[int]) -> None:
        """Keep these layers' outputs of each forward until `take`; `LM_HEAD_INPUT` is ignored."""
        for index in set(indices) - self._watched - {LM_HEAD_INPUT}:
            self.modules[index].register_forward_hook(partial(self._keep, index))
            self._watched.add(index)

    def take(self, indices: Sequence[int], head_input: Tensor, device: torch.device) -> Tensor:
        """Return hidden states of the last forward, concatenated: `[..., K · d]`, on `device`.

        `indices` are K layers, or `LM_HEAD_INPUT` for the LM head's input `[..., d]`.
        """
        outputs, self._outputs = self._outputs, {}
        if not indices:
            return head_input[..., :0].to(device)
        found = [(head_input if index == LM_HEAD_INPUT else outputs[index]).to(device) for index in indices]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @contextmanager
    def only_first(self, count: int) -> Iterator[None]:
        """Truncate the decoder to its first `count` layers and the final norm within a `with` block."""
        whole = self.modules
        if count not in self._shortened:
            self._shortened[count] = nn.ModuleList(list(whole)[:count])
        setattr(self._owner, self._attribute, self._shortened[count])
        try:
            yield
        finally:
            setattr(self._owner, self._attribute, whole)

    def _keep(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs[index] = output[0] if isinstance(output, tuple) else output


Verify = Callable[[TargetCache, TreeNodes], tuple[Tensor, Tensor]]


class ModelCode:
    """`Executor` that calls a transformers model, optionally compiled, with token ids and results on `device`."""

    def __init__(
        self, model: Any, decoder: nn.Module, layers: DecoderLayers, config: Any, device: torch.device
    ) -> None:
        self._model, self._decoder, self._layers, self._device = model, decoder, layers, device
        self._cache_name = cache_name(decoder)
        # Read once: transformers' configurations are slow to ask.
        self._dtype: torch.dtype = model.dtype
        self._max_positions = max_positions(config)
        self._kinds, self._maskless = attention_kinds(config), dict.fromkeys(maskless_kinds(config))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks: dict[str, Tensor | None] | None = None  # by kind, for a model that makes its own of a single one
        self._has_eyes = model.config is not config
        several = self._has_eyes and len(self._kinds) > 1
        self._makes_masks = several and not _hands_masks_on(model, decoder, self._kinds, device)
        if self._makes_masks:
            decoder.register_forward_pre_hook(self._replace_masks, with_kwargs=True)
        self.query_groups = 1  # query heads per KV head in the masks that the layers get; see `tree_attention`
        self.prefix_attention: PrefixAttention | None = None  # reads committed positions in `whole` layers
        self.whole = whole_layers(config)
        self.packs = False  # the layers take packed nodes
        self._head_input: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)
        self._verify: Verify = self._run

    def compile(self) -> None:
        """Compile the forward over trees. Errors come at the first calls for one and several rows and nodes."""
        options: dict[str, Any] = {}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options["recompile_limit"] = _VARIANTS
        else:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
        self._verify = torch.compile(self._run, dynamic=True, **options)

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]:
        """See `Executor.forward`. Needs `packs` for a `packing`."""
        try:
            if cache.depth == self._layers.count:
                return self._forward(cache, nodes, self._verify)
            with self._layers.only_first(cache.depth):
                return self._forward(cache, nodes, self._run)
        finally:
            self._masks = None  # which an error before the decoder's call has left

    @contextmanager
    def windows_up_to(self, longest: int) -> Iterator[None]:
        """See `Executor.windows_up_to`."""
        kinds = self._kinds
        self._kinds = {kind: (window and min(window, longest), chunk) for kind, (window, chunk) in kinds.items()}
        try:
            yield
        finally:
            self._kinds = kinds

    def _forward(
        self, cache: TargetCache, nodes: PromptNodes | TreeNodes, verify: Verify
    ) -> tuple[Tensor | None, Tensor]:
        self._layers.watch(nodes.hidden_layers)
        if isinstance(nodes, TreeNodes):
            if nodes.logits:
                return verify(cache, nodes)
            last = self._decoder(**self._tree_inputs(cache, nodes)).last_hidden_state
            hidden = self._layers.take(nodes.hidden_layers, last, self._device)
            return None, hidden if nodes.packing is None else nodes.packing.unpack(hidden)
        longest, device, features = nodes.tokens.shape[1], self._device, nodes.features
        chain = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        own = {} if features is None else features.masks(nodes.kv_length)
        inputs = self._inputs(cache, nodes, chain.expand(len(nodes.tokens), -1, -1), own=own)
        with nullcontext() if features is None else called_with(self._decoder, self._given(inputs, features)):
            if nodes.keep or self._has_eyes:  # a model that sees may embed a placeholder's id as another's
                logits, hidden = self._prefill_last(inputs, nodes, max(nodes.keep, 1))
                return logits if nodes.keep else None, hidden
            # The decoder without its LM head: these logits are never needed.
            last = self._decoder(**inputs).last_hidden_state
        return None, self._layers.take(nodes.hidden_layers, last, device)[0]

    def _given(self, inputs: dict[str, Any], features: Features) -> dict[str, Any]:
        """Return what the decoder is called with for features, whatever the model's forward makes of `inputs`."""
        masks = inputs["attention_mask"] if self._masks is None else self._masks
        own = {"attention_mask": masks, "position_ids": inputs["position_ids"]}
        return own | {name: value for name, value in features.inputs.items() if value is not None}

    def read_early(self, tokens: Tensor, layers: int) -> Tensor:
        with self._layers.only_first(layers):
            last: Tensor = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return last.to(self._device)

    def forget_head_input(self) -> None:
        """Drop the head input kept from an LM head call outside of a forward."""
        self._head_input = None

    def _run(self, cache: TargetCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        inputs, packing = self._tree_inputs(cache, nodes), nodes.packing
        logits = self._model(**inputs).logits.to(self._device)
        head_input, self._head_input = self._head_input, None
        assert head_input is not None
        hidden = self._layers.take(nodes.hidden_layers, head_input, self._device)
        return (logits, hidden) if packing is None else (packing.unpack(logits), packing.unpack(hidden))

    def _prefill_last(self, inputs: dict[str, Any], nodes: PromptNodes, keep: int) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        # The model hands out what its LM head makes of these, and may do something to the logits after that.
        hook = self._decoder.register_forward_hook(lambda *call: found.append(call[2].last_hidden_state))
        try:
            kept = {"logits_to_keep": keep} if self._keeps_logits else {}
            logits = self._model(**inputs, **kept).logits[0, -keep:].to(self._device)
        finally:
            hook.remove()
            self._head_input = None
        return logits, self._layers.take(nodes.hidden_layers, found[0], self._device)[0]

    def _tree_inputs(self, cache: TargetCache, nodes: TreeNodes) -> dict[str, Any]:
        """Read in two parts where a kernel reads committed positions to their own length."""
        attend, (rows, size) = self.prefix_attention, nodes.tokens.shape
        # Blocks are not in order, a tree larger than these has no mask for query heads that share a KV head, and the
        # keys of nodes that were run before are in the cache alone.
        # To compare the cache's sizes would be a guard of a compiler, and torch 2.11's cannot name sizes of objects.
        if attend is None or not cache.blocks.in_order or size > _LARGEST_TREE or nodes.follows:
            return self._inputs(cache, nodes, nodes.ancestors)
        kv = cache.layers[0]
        assert isinstance(kv, KVCache)
        layers, queries, single = kv.keys_values(), size * self.query_groups, size == 1
        if torch.compiler.is_compiling():  # which has one variant for one row, or node, and one for all other numbers
            rows, size = rows if rows == 1 else cache.slots, size if size == 1 else _USUAL_TREE
        lengths = nodes.lengths
        if nodes.full is not None:
            lengths = torch.where(lengths < nodes.full, lengths, 0)
        parts = parts_of(rows, layers[0][0].shape[1], size * self.query_groups, cache.length)
        if single:
            lengths = lengths + 1  # the node's own position is written before it is read
            if self.query_groups > 1:
                parts, queries = 1, 1
        prefix = Prefix(lengths, cache.length, parts, attend, queries, some=single)
        committed = CommittedLayers(layers, self.whole, prefix, all_seen=single)
        return self._inputs(cache, nodes, nodes.ancestors, committed)

    def _inputs(
        self,
        cache: TargetCache,
        nodes: Nodes,
        ancestors: Tensor,
        committed: CommittedLayers | None = None,
        own: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return what the model is called with; `own` are masks `[1, N, S]` bool of kinds that see other positions."""
        tokens, positions, packing = nodes.tokens, nodes.embedded_positions, nodes.packing
        groups = self.query_groups if tokens.shape[1] <= _LARGEST_TREE else 1
        masks: dict[str, Tensor | None] = {
            kind: additive(own[kind], self._dtype)
            if kind in own
            else self._mask(nodes, ancestors, window, chunk, groups, in_parts=committed is not None)
            for kind, (window, chunk) in self._kinds.items()
        }
        if masks:  # a model without attention takes none at all
            masks |= self._maskless
        if self._max_positions is not None:
            # Nodes past the end, and those of empty slots, are never emitted; but a learned position table must not be
            # read past its end, and some models scale all positions by the largest.
            positions = positions.clamp_max(self._max_positions - 1)
        apart = () if committed is None else committed.whole
        if self._makes_masks:
            self._masks = masks
        inputs = {
            "attention_mask": masks if len(masks) > 1 and not self._makes_masks else next(iter(masks.values()), None),
            self._cache_name: cache.view(nodes, apart),
            "use_cache": True,
        }
        if committed is not None:
            inputs["committed"] = committed
        if packing is None:
            return inputs | {"input_ids": tokens, "position_ids": positions}
        return inputs | {"input_ids": packing.pack(tokens), "position_ids": packing.pack(positions), "packing": packing}

    def _mask(
        self,
        nodes: Nodes,
        ancestors: Tensor,
        window: int | None,
        chunk: int | None,
        groups: int,
        *,
        in_parts: bool,
    ) -> Tensor:
        """Return the mask `[B, 1, G · N, S]` of the N nodes; S is N where attention is in two parts."""
        if in_parts and window is None and chunk is None:
            if nodes.tokens.shape[1] == 1:
                return ancestors[:, None]  # not read, but without one the model would make its own
            # A GPU's kernels want rows of masks to begin at a multiple of eight.
            size = ancestors.shape[2]
            padded = nn.functional.pad(ancestors, (0, -size % 8))
            return folded(additive(padded, self._dtype), groups)[..., :size]
        seen = tree_attention_mask(
            nodes.lengths, nodes.positions, ancestors, nodes.kv_length, window=window, chunk=chunk
        )
        return folded(additive(seen, self._dtype), groups)

    def _replace_masks(
        self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        masks, self._masks = self._masks, None
        return args, given if masks is None else {**given, "attention_mask": masks}

    def _keep_head_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0]


def _hands_masks_on(model: Any, decoder: nn.Module, kinds: Iterable[str], device: torch.device) -> bool:
    """Return whether a model calls its decoder with the masks that it is given by kind."""
    masks, token = dict.fromkeys(kinds), torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        given = call_of(decoder, lambda: model(input_ids=token, attention_mask=masks, use_cache=False))
    except Exception:  # a model's code may raise anything for what it was not made for
        return False
    return given.get("attention_mask") is masks
