"""Inputs of a forward of the target model: prompts, or draft trees behind committed texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter import devices
from drafter.target_model.attention import Packing
from drafter.target_model.sight import Features

LM_HEAD_INPUT = -1
"""In a list of hidden layers: the LM head's input, that is the last layer's output after the final norm."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Tokens of B rows in one forward. Row `b` has `lengths[b]` committed positions in the cache before them."""

    tokens: Tensor  # `[B, N]` int64; any valid id in padding
    lengths: Tensor  # `[B]` int64
    positions: Tensor  # `[B, N]` int64 positions in the text, for windows and masks
    shift: Tensor | None = None  # `[B]` int64 to add to these for embeddings, as images take other numbers of positions
    kv_length: int  # cache positions that attention reads; at least every row's length + N
    packing: Packing | None = None  # the nodes to compute, if not all
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)  # K hidden states to return, concatenated; see `DecoderLayers`
    slot: int = 0  # of the first row; the others follow it

    @property
    def embedded_positions(self) -> Tensor:
        """`[B, N]` int64 positions for embeddings."""
        return self.positions if self.shift is None else self.positions + self.shift[:, None]


@dataclass(frozen=True, kw_only=True)
class PromptNodes(Nodes):
    """Texts, each of whose tokens follows the one before. They are committed once they have been run."""

    keep: int = 0  # return the logits of so many tokens at the end of the only row
    spans: tuple[range, ...] = ()  # positions of each row's tokens, on the host
    features: Features | None = None  # of the only row's tokens, where its prompt has images


@dataclass(frozen=True, kw_only=True)
class TreeNodes(Nodes):
    """Draft trees, whose nodes are not committed before `TargetCache.commit`."""

    parents: Tensor  # `[B, N]` int64 index of each node's parent; node 0, and those of -1, follow the committed text
    ancestors: Tensor  # `[B, N, N]` bool, as `TokenTree.ancestors`
    full: int | None = None  # rows of so many committed positions are empty, and their output is not used
    follows: bool = False  # nodes left out of the packing have been run before, and others see them
    logits: bool = True  # return logits


def prompt_nodes(
    slot: int,
    prompts: Sequence[Tensor],
    starts: Sequence[int],
    hidden_layers: tuple[int, ...],
    keep: int = 0,
    *,
    features: Features | None = None,
    shift: Tensor | None = None,
) -> PromptNodes:
    """Return the nodes of prompts, or of chunks that begin at `starts`, for slots `slot` and following."""
    counts, device = [len(prompt) for prompt in prompts], prompts[0].device
    lengths = devices.send(torch.tensor(starts), device)
    return PromptNodes(
        tokens=nn.utils.rnn.pad_sequence(list(prompts), batch_first=True),
        lengths=lengths,
        positions=lengths[:, None] + torch.arange(max(counts), device=device),
        kv_length=max(start + count for start, count in zip(starts, counts, strict=True)),
        packing=Packing.of_counts(counts, device) if len(counts) > 1 else None,
        hidden_layers=hidden_layers,
        shift=shift,
        slot=slot,
        keep=keep,
        features=features,
        spans=tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True)),
    )
