"""Forwards of Llama-like models on a CPU by the C++ library: the same numbers up to rounding, much faster."""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drafter.native.build import (
    DecoderStruct,
    ForwardStruct,
    LayerStruct,
    PackedWeights,
    Pointer,
    UnsuitableError,
    library,
)
from drafter.target_model.architecture import attention_kinds
from drafter.target_model.cache import TargetCache
from drafter.target_model.kv_cache import KVCache
from drafter.target_model.nodes import PromptNodes, TreeNodes

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types of transformers with this structure: RMSNorm, rotary positions, grouped queries, gated SiLU."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the text's length."""


Addresses = tuple["ctypes.Array[Pointer]", "ctypes.Array[Pointer]"]


class NativeDecoder:
    """`Executor` for a Llama-like decoder in fp32; `config` is the decoder's.

    Raises:
        BuildError: The library cannot be compiled here.
        UnsuitableError: The model has another structure, is not in fp32 on a CPU, or has heads of another size.
    """

    def __init__(self, model: Any, decoder: Any, config: Any) -> None:
        _refuse_others(model, config)
        library()
        self._weights = PackedWeights()
        try:
            self._rotary: nn.Module = decoder.rotary_emb
            self._head_size: int = decoder.layers[0].self_attn.head_dim
            if not library().drafter_takes_heads_of(self._head_size):
                raise UnsuitableError(f"its heads have {self._head_size} numbers")
            self._layers = (LayerStruct * len(decoder.layers))(*map(self._layer, decoder.layers))
            self._struct = self._decoder(model, decoder, config)
        except AttributeError as error:
            raise UnsuitableError(str(error)) from error
        self._vocabulary, self._hidden = decoder.embed_tokens.weight.shape
        self._rotations: tuple[Tensor, Tensor] | None = None
        self._caches: WeakKeyDictionary[TargetCache, Addresses] = WeakKeyDictionary()

    def _layer(self, layer: Any) -> LayerStruct:
        attention, mlp, weights = layer.self_attn, layer.mlp, self._weights
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]  # some families norm their heads
        query_norm, key_norm = (None if norm is None else weights.address(norm.weight) for norm in norms)
        return LayerStruct(
            attention_norm=weights.address(layer.input_layernorm.weight),
            mlp_norm=weights.address(layer.post_attention_layernorm.weight),
            query_norm=query_norm,
            key_norm=key_norm,
            qkv=weights.matrix(*_joined(attention.q_proj, attention.k_proj, attention.v_proj)),
            output=weights.matrix(*_joined(attention.o_proj)),
            gate_up=weights.gated(*_joined(mlp.gate_proj, mlp.up_proj)),
            down=weights.after_gate(*_joined(mlp.down_proj)),
        )

    def _decoder(self, model: Any, decoder: Any, config: Any) -> DecoderStruct:
        weights, embedding = self._weights, decoder.embed_tokens.weight
        return DecoderStruct(
            layers=self._layers,
            embedding=weights.address(embedding),
            final_norm=weights.address(decoder.norm.weight),
            head=weights.matrix(*_joined(model.get_output_embeddings())),
            positions=0,
            hidden=embedding.shape[1],
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=self._head_size,
            intermediate=self._layers[0].down.inputs,
            vocabulary=embedding.shape[0],
            epsilon=config.rms_norm_eps,
            scale=decoder.layers[0].self_attn.scaling,
        )

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]:
        """See `Executor.forward`. Raises `IndexError` for a node outside the cache, or a token of no vocabulary."""
        rows, size = nodes.tokens.shape
        which = torch.arange(rows * size) if nodes.packing is None else nodes.packing.nodes
        taps, logits = nodes.hidden_layers, None
        hidden = _floats(rows, size, len(taps) * self._hidden)
        if nodes.logits if isinstance(nodes, TreeNodes) else nodes.keep:
            logits = _floats(rows, size, self._vocabulary)
            if len(which) < rows * size:
                logits.zero_()
                hidden.zero_()
        self._run(cache, nodes, which, taps, hidden, logits)
        if isinstance(nodes, TreeNodes):
            return logits, hidden
        return (
            None if logits is None else logits[0, -nodes.keep :],
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
        (keys, values), blocks = self._addresses(cache), cache.blocks
        forward = ForwardStruct(
            keys=keys,
            values=values,
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
            kv = cache.layers[0]
            assert isinstance(kv, KVCache)
            layers = kv.keys_values()
            self._caches[cache] = (
                (Pointer * len(layers))(*(keys.data_ptr() for keys, _ in layers)),
                (Pointer * len(layers))(*(values.data_ptr() for _, values in layers)),
            )
        return self._caches[cache]

    def _prepare_positions(self, count: int) -> None:
        if count > self._struct.positions:
            tables = self._rotary(torch.zeros(1, 1, 1, dtype=torch.float32), torch.arange(count)[None])
            cosines, sines = (table[0, :, : self._head_size // 2].float().contiguous() for table in tables)
            self._rotations = cosines, sines
            self._struct.cosines, self._struct.sines = cosines.data_ptr(), sines.data_ptr()
            self._struct.positions = count


def _refuse_others(model: Any, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise UnsuitableError(f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}")
    if config.hidden_act != "silu":
        raise UnsuitableError(f"its activation is {config.hidden_act}, not silu")
    if any(kind != (None, None) for kind in attention_kinds(config).values()):
        raise UnsuitableError("some of its layers do not see the whole text")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _STATIC_ROPE:
        raise UnsuitableError(f"its rotary positions ({kind}) depend on the text's length")
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise UnsuitableError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on a CPU")
        if type(tensor) is not nn.Parameter:
            raise UnsuitableError(f"{name} is quantised")


def _joined(*layers: Any) -> tuple[Tensor, Tensor | None]:
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
