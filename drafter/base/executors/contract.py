"""What runs the base's forward: the model's own code as it is, compiled, or something faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.base.kv_cache import KVCache
from drafter.base.packing import Packing


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of one forward. Row `b` of B has `lengths[b]` committed positions before its nodes.

    Args:
        tokens: `[B, N]` int64 node tokens; any valid id in padding.
        lengths: `[B]` int64 committed positions.
        depths: `[B, N]` int64 depth of each node below the root.
        ancestors: `[B, N, N]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.
        kv_length: Cache positions that attention reads; at least every row's length + N.
        packing: Which nodes are not padding, if only these are to be computed.
        hidden_layers: K hidden states to return, side by side; see `DecoderLayers.take`.
        full: Rows of so many committed positions are empty: what their nodes see does not matter. None if none are.
        follows: Whether nodes that the packing leaves out have been run before, and are seen by others.
    """

    tokens: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    kv_length: int
    packing: Packing | None = None
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)
    full: int | None = None
    follows: bool = False


class Executor(Protocol):
    """Runs forwards of a base over a KV cache. All of them give the same tokens."""

    def verify(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Run tree nodes of the first B slots; return logits `[B, N, V]` and hidden states `[B, N, K · d]`."""

    def prefill(
        self,
        cache: KVCache,
        slot: int,
        prompts: Sequence[Tensor],
        starts: Sequence[int],
        hidden_layers: tuple[int, ...],
    ) -> Tensor:
        """Run prompts, or pieces of them, into slots; return their hidden states `[ΣP, K · d]`.

        Args:
            cache: Holds the committed positions on which each prompt follows.
            slot: Where the first one goes to; the others follow it.
            prompts: Each `[P]`, at least one token.
            starts: Position of each one's first token.
            hidden_layers: Which K hidden states to return; see `DecoderLayers.take`.
        """

    def prefill_last(
        self, cache: KVCache, slot: int, prompt: Tensor, start: int, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run the last piece of one prompt; return the logits `[1, V]` after it and its hidden states `[P, K · d]`."""

    def exit_early(self, cache: KVCache, nodes: TreeNodes, layers: int, first: int) -> Tensor:
        """Run only the first layers, and the final norm, over the nodes from `first` on; see `BaseModel.exit_early`."""
