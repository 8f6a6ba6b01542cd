"""Reading a Llama-like decoder of transformers: which models are one, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafter.base.architecture import attention_kinds

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types of transformers that have this structure: RMSNorm, rotary positions, grouped queries, gated SiLU."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose frequencies do not depend on the text's length."""


class NotLlamaLikeError(Exception):
    """A model has another structure; the message says what differs."""


class Linear(NamedTuple):
    """Weights `[outputs, inputs]` and bias `[outputs]` of linear layers with the same input, one after another."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; `query_norm` and `key_norm` `[D]` are of models that norm their heads."""

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
    """A decoder's weights, fp32 on a CPU, and its sizes.

    Args:
        layers: From the first to the last.
        embedding: `[V, d]`.
        final_norm: `[d]`.
        head: `[V, d]` LM head.
        rotary: Gives cosines and sines `[1, P, D]` for an input and positions `[1, P]`.
        heads: H query heads.
        kv_heads: H' heads of keys and values.
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
    """Read a model.

    Args:
        model: The causal LM.
        decoder: The model without its LM head.
        config: Of the decoder.

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
    """Return linear layers with the same input as one.

    Raises:
        NotLlamaLikeError: One of them is not a linear layer, or some have a bias and others do not.
    """
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
