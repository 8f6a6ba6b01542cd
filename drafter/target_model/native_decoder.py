"""Forwards of a model on a CPU by the C++ library: the same numbers up to rounding, much faster."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drafter.native.build import (
    DecoderStruct,
    ExpertsStruct,
    ForwardStruct,
    LayerStruct,
    MatrixStruct,
    PackedWeights,
    Pointer,
    UnsuitableError,
    library,
)
from drafter.native.mixing import StatesStruct
from drafter.target_model.architecture import attention_kinds, layer_kinds, max_positions
from drafter.target_model.blocks import FAMILIES, Block
from drafter.target_model.cache import TargetCache
from drafter.target_model.kv_cache import KVCache
from drafter.target_model.mixers import Mixer
from drafter.target_model.native_mixers import NativeMixer
from drafter.target_model.nodes import PromptNodes, TreeNodes
from drafter.target_model.state_cache import StateCache

_GATES = {"silu": 0, "gelu_pytorch_tanh": 1}
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
"""Rotary embeddings whose frequencies do not depend on the text's length, up to `max_positions`."""
_ENDLESS = (1 << 63) - 1  # the window of a layer that sees the whole text

Addresses = tuple["ctypes.Array[Pointer]", "ctypes.Array[Pointer]", "ctypes.Array[StatesStruct]"]


class NativeDecoder:
    """`Executor` in fp32 for a decoder of one of the `FAMILIES`; `config` is the decoder's.

    Raises `BuildError` if the library cannot be compiled here, and `UnsuitableError` if the model has another
    structure, is not in fp32 on a CPU, or has heads of another size.
    """

    def __init__(self, model: Any, decoder: Any, config: Any) -> None:
        self._weights = PackedWeights()
        self._kinds = layer_kinds(config)
        try:
            self._block = _block_of(model, config)
            library()
            self._rotary: nn.Module = decoder.rotary_emb
            self._mixers = self._mixers_of(decoder)
            self._attention: Any = next(layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
            self._head_size: int = self._attention.head_dim
            if not library().drafter_takes_heads_of(self._head_size):
                raise UnsuitableError(f"its heads have {self._head_size} numbers")
            self._layers = (LayerStruct * len(decoder.layers))(*starmap(self._layer, enumerate(decoder.layers)))
            self._struct = self._decoder(model, decoder, config)
        except (AttributeError, StopIteration) as error:
            raise UnsuitableError(str(error) or "no layer has attention") from error
        windows = {kind: window or _ENDLESS for kind, (window, _) in attention_kinds(config).items()}
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            layer.window = windows.get(kind, _ENDLESS)
        self._vocabulary, self._hidden = decoder.embed_tokens.weight.shape
        self._longest = max_positions(config)
        self._rotations: dict[str, tuple[Tensor, Tensor]] = {}
        self._caches: WeakKeyDictionary[TargetCache, Addresses] = WeakKeyDictionary()

    def _mixers_of(self, decoder: Any) -> dict[int, NativeMixer]:
        """Return the mixers that stand in place of attention, by layer."""
        found = {}
        for number, layer in enumerate(decoder.layers):
            if self._block.mixer and hasattr(layer, self._block.mixer):
                mixer = getattr(layer, self._block.mixer).forward
                if not isinstance(mixer, Mixer) or mixer.native is None:
                    raise UnsuitableError(f"the mixer of layer {number} has no kernel")
                found[number] = mixer.native
        return found

    def _layer(self, number: int, layer: Any) -> LayerStruct:
        block, weights = self._block, self._weights
        mlp = getattr(layer, block.mlp)
        struct = LayerStruct(
            attention_norm=self._norm(layer, block.before_attention),
            mlp_norm=self._norm(layer, block.before_mlp),
            attention_after=self._norm(layer, block.after_attention),
            mlp_after=self._norm(layer, block.after_mlp),
        )
        if number in self._mixers:
            struct.mixer = ctypes.addressof(self._mixers[number].struct)
        else:
            attention = layer.self_attn
            struct.qkv = weights.matrix(
                *_joined([getattr(attention, name) for name in block.qkv]), self._qkv_order(attention)
            )
            struct.output = weights.matrix(*_joined([getattr(attention, block.output)]))
            if hasattr(attention, block.head_norms[0]):
                struct.query_norm, struct.key_norm = (self._norm(attention, name) for name in block.head_norms)
        if hasattr(mlp, "experts"):
            struct.experts = ctypes.pointer(self._experts(mlp))
        else:
            struct.gate_up = weights.gated(*_joined([getattr(mlp, name) for name in block.gate_up]))
            struct.down = weights.after_gate(*_joined([getattr(mlp, block.down)]))
        return struct

    def _qkv_order(self, attention: Any) -> Tensor | None:
        """Return outputs in the library's order, gates last; None where they have it."""
        if not self._block.gated:
            return None
        queries, others = attention.q_proj.out_features, attention.k_proj.out_features + attention.v_proj.out_features
        query, gate = torch.arange(queries).view(-1, 2, self._head_size).unbind(1)
        return torch.cat([query.flatten(), torch.arange(queries, queries + others), gate.flatten()])

    def _experts(self, mlp: Any) -> ExpertsStruct:
        experts, router, weights = mlp.experts, mlp.gate, self._weights
        gate_up = [weights.gated(weight) for weight in experts.gate_up_proj]
        down = [weights.after_gate(weight) for weight in experts.down_proj]
        return ExpertsStruct(
            router=weights.matrix(router.weight),
            gate_up=(MatrixStruct * len(gate_up))(*gate_up),
            down=(MatrixStruct * len(down))(*down),
            taken=router.top_k,
            normed=router.norm_topk_prob,
        )

    def _norm(self, owner: Any, name: str | None) -> int | None:
        if name is None:
            return None
        weight = getattr(owner, name).weight
        return self._weights.address(weight + self._block.norm_offset if self._block.norm_offset else weight)

    def _decoder(self, model: Any, decoder: Any, config: Any) -> DecoderStruct:
        block, embedding, attention = self._block, decoder.embed_tokens.weight, self._attention
        query_norm = getattr(attention, block.head_norms[0], None)
        normed = self._head_size if query_norm is None else len(query_norm.weight)
        return DecoderStruct(
            layers=self._layers,
            embedding=self._weights.address(embedding),
            final_norm=self._norm(decoder, block.final_norm),
            head=self._weights.matrix(*_joined([model.get_output_embeddings()])),
            positions=0,
            hidden=embedding.shape[1],
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=self._head_size,
            vocabulary=embedding.shape[0],
            joint_heads=normed != self._head_size,
            gated=block.gated,
            epsilon=getattr(config, block.epsilon),
            scale=attention.scaling,
            score_cap=block.score_cap or 0,
            embedding_scale=block.embedding_scale,
            residual_scale=block.residual_scale,
            logit_scale=block.logit_scale,
            logit_cap=block.logit_cap or 0,
            gate=_GATES[block.gate],
        )

    @contextmanager
    def windows_up_to(self, longest: int) -> Iterator[None]:
        """See `Executor.windows_up_to`."""
        windows = [layer.window for layer in self._layers]
        for layer in self._layers:
            layer.window = layer.window if layer.window == _ENDLESS else min(layer.window, longest)
        try:
            yield
        finally:
            for layer, window in zip(self._layers, windows, strict=True):
                layer.window = window

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]:
        """See `Executor.forward`. Raises `IndexError` for a node outside the cache, or a token of no vocabulary."""
        rows, size = nodes.tokens.shape
        which = torch.arange(rows * size) if nodes.packing is None else nodes.packing.nodes
        taps, logits = nodes.hidden_layers, None
        hidden = _floats(rows, size, len(taps) * self._hidden)
        kept = size * nodes.logits if isinstance(nodes, TreeNodes) else nodes.keep
        if kept:
            logits = _floats(rows, kept, self._vocabulary)
            if len(which) < rows * size:
                logits.zero_()
                hidden.zero_()
        self._run(cache, nodes, which, taps, hidden, logits)
        if isinstance(nodes, TreeNodes):
            return logits, hidden
        return (
            None if logits is None else logits[0],
            hidden[0] if nodes.packing is None else hidden.flatten(0, 1)[which],
        )

    def _run(
        self,
        cache: TargetCache,
        nodes: PromptNodes | TreeNodes,
        which: Tensor,
        taps: tuple[int, ...],
        hidden: Tensor,
        logits: Tensor | None,
    ) -> None:
        """Run the nodes `which` `[M]`; fill `hidden` `[B, N, K · d]` and `logits` `[B, N, V]`, of a prompt the last."""
        self._prepare_positions(cache.length)
        rows, size = nodes.tokens.shape
        # Kept until the call returns.
        tokens, lengths = nodes.tokens.contiguous(), nodes.lengths.contiguous()
        positions, which = nodes.embedded_positions.contiguous(), which.contiguous()
        ancestors = nodes.ancestors.contiguous() if isinstance(nodes, TreeNodes) else None
        tapped = (ctypes.c_int64 * len(taps))(*taps)
        (keys, values, of_mixers), blocks, states = self._addresses(cache), cache.blocks, _states_in(cache)
        texts, kept = (None, None) if states is None else self._open(states, nodes, len(keys))
        forward = ForwardStruct(
            keys=keys,
            values=values,
            texts=texts,
            states=ctypes.addressof(of_mixers),
            kept=kept,
            blocks=blocks.table.data_ptr(),
            block=blocks.size,
            slot_blocks=blocks.table.shape[1],
            first_slot=nodes.slot,
            rows=rows,
            nodes=size,
            tokens=tokens.data_ptr(),
            lengths=lengths.data_ptr(),
            positions=positions.data_ptr(),
            ancestors=None if ancestors is None else ancestors.data_ptr(),
            which=which.data_ptr(),
            count=len(which),
            taps=ctypes.addressof(tapped),
            tap_count=len(taps),
            hidden=hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            logits_from=size - nodes.keep if isinstance(nodes, PromptNodes) else 0,
            layers=len(keys),
            threads=torch.get_num_threads(),
        )
        if not library().drafter_forward(ctypes.byref(self._struct), ctypes.byref(forward)):
            raise IndexError("a node lies outside the KV cache, or a token outside the vocabulary")

    def _addresses(self, cache: TargetCache) -> Addresses:
        if cache not in self._caches:
            kv, states = cache.layers[0], _states_in(cache)
            assert isinstance(kv, KVCache)
            layers = kv.keys_values()
            of_mixers = [StatesStruct() for _ in layers]
            for layer, mixer in self._mixers.items():
                if states is not None and layer < len(layers):
                    of_mixers[layer] = mixer.over(states).states()
            self._caches[cache] = (
                (Pointer * len(layers))(*(keys.data_ptr() for keys, _ in layers)),
                (Pointer * len(layers))(*(values.data_ptr() for _, values in layers)),
                (StatesStruct * len(layers))(*of_mixers),
            )
        return self._caches[cache]

    def _open(
        self, states: StateCache, nodes: PromptNodes | TreeNodes, depth: int
    ) -> tuple[int, ctypes.Array[Pointer]]:
        """Open a forward of a hybrid: return its texts, and where each layer keeps what states are made of."""
        view = states.view(nodes)
        rooms = {layer: mixer.room(view) for layer, mixer in self._mixers.items() if layer < depth}
        pointers = [rooms[layer].data_ptr() if layer in rooms else None for layer in range(depth)]
        return view.texts.address, (Pointer * depth)(*pointers)

    def _prepare_positions(self, count: int) -> None:
        # Some rotary embeddings change all frequencies past the longest text; tokens there are never emitted.
        count = min(count, self._longest or count)
        if count <= self._struct.positions:
            return
        inputs = torch.zeros(1, 1, 1, dtype=torch.float32), torch.arange(count)[None]
        by_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
        for kind in set(self._kinds):
            tables = self._rotary(*inputs, *([kind] if by_kind else []))
            cosines, sines = (table[0, :, : table.shape[2] // 2].float().contiguous() for table in tables)
            self._rotations[kind] = cosines, sines
            self._struct.rotated = 2 * cosines.shape[1]
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            layer.cosines, layer.sines = (table.data_ptr() for table in self._rotations[kind])
        self._struct.positions = count


def _states_in(cache: TargetCache) -> StateCache | None:
    return next((layer for layer in cache.layers if isinstance(layer, StateCache)), None)


def _block_of(model: Any, config: Any) -> Block:
    """Return the description of a model's blocks; raise `UnsuitableError` if it has none, or cannot run."""
    if config.model_type not in FAMILIES:
        raise UnsuitableError(f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}")
    block = FAMILIES[config.model_type](config)
    if block.gate not in _GATES:
        raise UnsuitableError(f"its activation is {block.gate}, not {' or '.join(_GATES)}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for kind in _rotary_kinds(rope):
        if kind not in _STATIC_ROPE:
            raise UnsuitableError(f"its rotary positions ({kind}) depend on the text's length")
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise UnsuitableError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on a CPU")
        if type(tensor) is not nn.Parameter:
            raise UnsuitableError(f"{name} is quantised")
    return block


def _rotary_kinds(parameters: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary positions, of all kinds of layers if each has parameters of its own."""
    inside = [one for one in parameters.values() if isinstance(one, dict)]
    for one in inside or [parameters]:
        yield one.get("rope_type") or one.get("type") or "default"


def _joined(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Stack weights `[outputs, inputs]` and biases `[outputs]` of linear layers with the same input."""
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise UnsuitableError(f"{type(layer).__name__} stands where a linear layer is expected")
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return weight, None
    if any(bias is None for bias in biases):
        raise UnsuitableError("some of its query, key and value layers have a bias, and others have none")
    return weight, torch.cat([bias.detach() for bias in biases])


def _floats(*shape: int) -> Tensor:
    # Not the default dtype: a load in another thread changes it.
    return torch.empty(shape, dtype=torch.float32)
