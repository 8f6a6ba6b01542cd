"""Sizes of a Llama-like target model, from which what its forwards read follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BaseSizes:
    """Sizes of a Llama-like base.

    Args:
        layers: L.
        hidden: d, width of the hidden states.
        intermediate: Width inside the gated MLP.
        queries: Numbers of all query heads of a position.
        keys: Numbers of all KV heads of a position, of the keys alone.
        vocabulary: V.
        itemsize: Bytes of a number of weights, keys, values and logits.
    """

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    itemsize: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> BaseSizes:
        """Read them from a transformers configuration."""
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            heads * size,
            shared * size,
            config.vocab_size,
            dtype.itemsize,
        )

    @property
    def weights(self) -> int:
        """Bytes of the weights that a forward reads: all matrices and the LM head, but of the embedding little."""
        layer = self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)
        return (self.layers * layer + self.vocabulary * self.hidden) * self.itemsize

    @property
    def kv_per_position(self) -> int:
        """Bytes of the keys and values of a position."""
        return 2 * self.layers * self.keys * self.itemsize
