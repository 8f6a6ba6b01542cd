"""Forwards of Llama-like models on a CPU by the C++ library: the same numbers up to rounding, much faster."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drafter.native.build import DecoderStruct, ForwardStruct, LayerStruct, PackedWeights, Pointer, library
from drafter.target.architecture import attention_kinds
from drafter.target.forward import LM_HEAD_INPUT, TreeNodes
from drafter.target.kv_cache import KVCache

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types of transformers with this structure: RMSNorm, rotary positions, grouped queries, gated SiLU."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the text's length."""


class NotLlamaLikeError(Exception):
    """The model has another structure; the message says what differs."""


class Linear(NamedTuple):
    """Stacked weights `[outputs, inputs]` and bias `[outputs]` of linear layers with the same input."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; `query_norm` and `key_norm` `[D]` only in models that norm their heads."""

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class LlamaLike:
    """Weights of a decoder, fp32 on a CPU, and its sizes.

    Args:
        embedding: `[V, d]`.
        final_norm: `[d]`.
        head: `[V, d]` LM head.
        rotary: Maps an input and positions `[1, P]` to cosines and sines `[1, P, D]`.
        heads: H query heads.
        kv_heads: H' KV heads.
        head_size: D.
        epsilon: Of the norms.
        scale: Factor of the attention scores.
    """

    layers: list[DecoderLayer]
    embedding: Tensor
    final_norm: Tensor
    head: Linear
    rotary: nn.Module
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    scale: float

    def rotations(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[positions, D / 2]`, as the model computes them."""
        places = torch.arange(positions)[None]
        cosines, sines = self.rotary(torch.zeros(1, 1, 1, dtype=torch.float32), places)
        half = self.head_size // 2
        return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()


def read_llama_like(model: Any, decoder: Any, config: Any) -> LlamaLike:
    """Read the weights of a causal LM; `decoder` is the model without LM head, `config` the decoder's.

    Raises:
        NotLlamaLikeError: It has another structure, or is not in fp32 on a CPU.
    """
    _refuse_others(model, config)
    try:
        layers = [_layer(layer) for layer in decoder.layers]
        attention = decoder.layers[0].self_attn
        read = LlamaLike(
            layers=layers,
            embedding=decoder.embed_tokens.weight.detach(),
            final_norm=decoder.norm.weight.detach(),
            head=_joined(model.get_output_embeddings()),
            rotary=decoder.rotary_emb,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
        )
    except AttributeError as error:
        raise NotLlamaLikeError(str(error)) from error
    return read


def _refuse_others(model: Any, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise NotLlamaLikeError(f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}")
    if config.hidden_act != "silu":
        raise NotLlamaLikeError(f"its activation is {config.hidden_act}, not silu")
    if any(kind != (None, None) for kind in attention_kinds(config).values()):
        raise NotLlamaLikeError("some of its layers do not see the whole text")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _STATIC_ROPE:
        raise NotLlamaLikeError(f"its rotary positions ({kind}) depend on the text's length")
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise NotLlamaLikeError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on a CPU")
        if type(tensor) is not nn.Parameter:
            raise NotLlamaLikeError(f"{name} is quantised")


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        attention_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_joined(attention.o_proj),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
    )


def _weight(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _joined(*layers: Any) -> Linear:
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise NotLlamaLikeError(f"{type(layer).__name__} stands where a linear layer is expected")
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return Linear(weight, None)
    if any(bias is None for bias in biases):
        raise NotLlamaLikeError("some of its query, key and value layers have a bias, and others have none")
    return Linear(weight, torch.cat([bias.detach() for bias in biases]))


Addresses = tuple["ctypes.Array[Pointer]", "ctypes.Array[Pointer]"]


class NativeDecoder:
    """`Executor` for a Llama-like decoder.

    Raises:
        BuildError: The library cannot be compiled here.
        NotLlamaLikeError: The library does not support its head size.
    """

    def __init__(self, decoder: LlamaLike) -> None:
        if not library().drafter_takes_heads_of(decoder.head_size):
            raise NotLlamaLikeError(f"its heads have {decoder.head_size} numbers")
        self._decoder = decoder
        self._weights = weights = PackedWeights()
        layers = (LayerStruct * len(decoder.layers))()
        for struct, layer in zip(layers, decoder.layers, strict=True):
            struct.attention_norm = weights.address(layer.attention_norm)
            struct.mlp_norm = weights.address(layer.mlp_norm)
            struct.query_norm = weights.address(layer.query_norm)
            struct.key_norm = weights.address(layer.key_norm)
            struct.qkv = weights.matrix(*layer.qkv)
            struct.output = weights.matrix(*layer.output)
            struct.gate_up = weights.gated(*layer.gate_up)
            struct.down = weights.after_gate(*layer.down)
        self._layers = layers
        self._vocabulary, self._hidden = decoder.embedding.shape
        self._struct = DecoderStruct(
            layers=layers,
            embedding=weights.address(decoder.embedding),
            final_norm=weights.address(decoder.final_norm),
            head=weights.matrix(*decoder.head),
            positions=0,
            hidden=self._hidden,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_size=decoder.head_size,
            intermediate=layers[0].down.inputs,
            vocabulary=self._vocabulary,
            epsilon=decoder.epsilon,
            scale=decoder.scale,
        )
        self._rotations: tuple[Tensor, Tensor] | None = None
        self._caches: WeakKeyDictionary[KVCache, Addresses] = WeakKeyDictionary()

    def forward(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor | None, Tensor]:
        """See `Executor.forward`.

        Raises:
            IndexError: A node lies outside the cache, or a token outside the vocabulary.
        """
        rows, size = nodes.tokens.shape
        fresh, is_prompt = size - nodes.first, nodes.ancestors is None
        which = torch.arange(rows * fresh) if nodes.packing is None else nodes.packing.nodes
        if nodes.first:
            which = which // fresh * size + nodes.first + which % fresh
        # After the first layers, the final norm's output stands where the LM head's input does otherwise.
        taps = nodes.hidden_layers if nodes.layers is None else (LM_HEAD_INPUT,)
        hidden, logits = _floats(rows, size, len(taps) * self._hidden), None
        if nodes.logits and nodes.layers is None:
            logits = _floats(rows, size, self._vocabulary)
            if len(which) < rows * size:
                logits.zero_()
                hidden.zero_()
        self._run(cache, nodes, which, taps, hidden, logits)
        if not is_prompt:
            return logits, hidden[:, nodes.first :]
        return (
            None if logits is None else logits[0, -1:],
            hidden[0] if nodes.packing is None else hidden.flatten(0, 1)[which],
        )

    def _run(
        self,
        cache: KVCache,
        nodes: TreeNodes,
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
        depths, which = nodes.depths.contiguous(), which.contiguous()
        ancestors = None if nodes.ancestors is None else nodes.ancestors.contiguous()
        tapped = (ctypes.c_int64 * len(taps))(*taps)
        keys, values = self._addresses(cache)
        forward = ForwardStruct(
            keys=keys,
            values=values,
            blocks=cache.blocks.data_ptr(),
            block=cache.block,
            slot_blocks=cache.blocks.shape[1],
            first_slot=nodes.slot,
            rows=rows,
            nodes=size,
            tokens=tokens.data_ptr(),
            lengths=lengths.data_ptr(),
            depths=depths.data_ptr(),
            ancestors=None if ancestors is None else ancestors.data_ptr(),
            which=which.data_ptr(),
            count=len(which),
            taps=ctypes.addressof(tapped),
            tap_count=len(taps),
            hidden=hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            logits_from=size - 1 if ancestors is None else 0,
            layers=len(self._layers) if nodes.layers is None else nodes.layers,
            threads=torch.get_num_threads(),
        )
        if not library().drafter_forward(ctypes.byref(self._struct), ctypes.byref(forward)):
            raise IndexError("a node lies outside the KV cache, or a token outside the vocabulary")

    def _addresses(self, cache: KVCache) -> Addresses:
        if cache not in self._caches:
            layers = cache.layers()
            self._caches[cache] = (
                (Pointer * len(layers))(*(keys.data_ptr() for keys, _ in layers)),
                (Pointer * len(layers))(*(values.data_ptr() for _, values in layers)),
            )
        return self._caches[cache]

    def _prepare_positions(self, count: int) -> None:
        if count > self._struct.positions:
            self._rotations = self._decoder.rotations(count)
            self._struct.cosines, self._struct.sines = (part.data_ptr() for part in self._rotations)
            self._struct.positions = count


def _floats(*shape: int) -> Tensor:
    # Not the default dtype: a load in another thread changes it.
    return torch.empty(shape, dtype=torch.float32)
