"""Families that the native decoder runs, each described by how its blocks differ from Llama's.

What a description leaves out (rotary tables, windows, scale of attention, norms of heads, biases, experts) is read from
the model itself. A wrong description is found at load, where numbers are compared with those of the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block: norm, attention or mixer, norm; norm, MLP, norm. Names are those of transformers' modules."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what attention adds to the residual stream
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm_offset: float = 0.0  # added to the weights of all norms
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gated: bool = False  # attention's output is; the query layer gives each head's query, then its gate
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # which some families have
    output: str = "o_proj"
    mixer: str = ""  # what stands in place of attention in some layers
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    final_norm: str = "norm"
    epsilon: str = "rms_norm_eps"  # the setting of all norms
    gate: str = "silu"  # transformers' name of the function
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    score_cap: float | None = None  # a score s of attention becomes cap · tanh(s / cap)
    logit_cap: float | None = None


def _llama(config: Any) -> Block:
    return Block(gate=config.hidden_act)


def _phi3(config: Any) -> Block:
    return Block(gate=config.hidden_act, qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def _granite(config: Any) -> Block:
    return Block(
        gate=config.hidden_act,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _olmo2(config: Any) -> Block:
    return Block(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        gate=config.hidden_act,
    )


def _gemma3(config: Any) -> Block:
    return Block(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        norm_offset=1.0,
        gate=config.hidden_activation,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )


def _gemma2(config: Any) -> Block:
    return replace(_gemma3(config), score_cap=config.attn_logit_softcapping)


def _qwen3_5(config: Any) -> Block:
    return Block(gate=config.hidden_act, norm_offset=1.0, gated=True, mixer="linear_attn")


def _lfm2(config: Any) -> Block:
    return Block(
        before_attention="operator_norm",
        before_mlp="ffn_norm",
        head_norms=("q_layernorm", "k_layernorm"),
        output="out_proj",
        mixer="conv",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
        final_norm="embedding_norm",
        epsilon="norm_eps",
    )


FAMILIES: dict[str, Callable[[Any], Block]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "qwen3_5_text": _qwen3_5,
    "lfm2": _lfm2,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""Description by `model_type` of a decoder's configuration."""
