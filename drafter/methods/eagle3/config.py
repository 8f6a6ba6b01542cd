"""Configuration of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from drafter.errors import shown
from drafter.heads.attention import rotary_rates, scaled_rates
from drafter.heads.contract import check_draft_vocab, check_hidden_layers, check_sizes


@dataclass(frozen=True)
class Eagle3HeadConfig:
    """Shape of an EAGLE-3 head.

    Args:
        hidden_size: d, width of the target model's hidden states and of the layer.
        vocab_size: V, size of the target model's vocabulary.
        hidden_layers: Layers of the target model whose outputs are fused, low to high; see `DraftSpec.hidden_layers`.
        depth: U, number of steps that the loss unrolls and of levels of a tree.
        num_heads: Attention heads.
        num_kv_heads: Key-value heads, shared by the attention heads; None for as many.
        head_size: Width of a head, even; None for `hidden_size / num_heads`.
        intermediate_size: Inner width of the gated MLP.
        fusion_norm: Norms before the hidden states are fused: one of all side by side (`whole`), or one of `each`.
        qk_norm: Whether queries and keys are normed, head by head.
        norm_before_residual: Whether the layer's residual stream starts behind the norm of the hidden state.
        norm_output: Whether a step reads the last one's output behind the final norm.
        norm_eps: Added to the variance in all norms.
        rope_theta: Base of the rotary positions.
        rope_scaling: Scales their rates; see `scaled_rates`.
        depth_decay: Weight of a step's loss relative to the step before it.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.

    Raises:
        ValueError: The sizes do not fit together.
    """

    hidden_size: int
    vocab_size: int
    hidden_layers: tuple[int, ...]
    depth: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int = 704
    fusion_norm: Literal["none", "whole", "each"] = "none"
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    depth_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "depth", "num_heads", "intermediate_size", "rope_theta")
        check_draft_vocab(self)
        check_hidden_layers(self)
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads")
        if self.head_width % 2 or self.head_width < 2:
            raise ValueError(f"heads must have an even width, not {self.head_width}")
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.kv_heads} heads of keys and values")
        if not bool(scaled_rates(torch.ones(1, device="cpu"), self.rope_scaling or {}).isfinite().all()):
            raise ValueError(f"rope_scaling {shown(self.rope_scaling)} turns heads by angles that are not finite")

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def rotary_rates(self, device: torch.device) -> torch.Tensor:
        """Return rotary angles per position, `[D / 2]` float64."""
        return scaled_rates(rotary_rates(self.rope_theta, self.head_width, device), self.rope_scaling or {})


def fused_layers(count: int) -> tuple[int, ...]:
    """Return the default layers to fuse of a target model with `count` layers: a low, a middle and a high one.

    The published heads read the inputs of layers 2, `count / 2` and `count - 3`; shallower models use their thirds.
    """
    published = (1, count // 2 - 1, count - 4)
    if published[0] < published[1] < published[2]:
        return published
    return tuple(sorted({max(0, count * part // 3 - 1) for part in (1, 2, 3)}))
