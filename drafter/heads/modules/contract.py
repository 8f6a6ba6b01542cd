"""The contract between draft modules and the heads that read their frames.

A module computes `T` frame states for each pending token from the text so far. It does so in two ways that must agree:
for many anchors of a known text (training, simulated walks), and step by step for the engine's slots (decoding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import DraftContext


class DraftModule(nn.Module, ABC):
    """Frame states from tokens and the base's hidden states."""

    num_frames: int
    """T."""

    @abstractmethod
    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames for many anchors of known texts, each as decoding would compute it there, `[B, A, F, d]`.

        Args:
            embeddings: `[B, L, d]` frozen embeddings of the tokens.
            hidden: `[B, L, K · d]` the base's hidden states that the head reads, `DraftHead.hidden_layers`.
            anchors: `[B, A]` positions of the pending tokens. Hidden states from an anchor on are not read for it.
            count: F, number of frames, counted from the first; None for all T. Frames that attend to one another may
                attend to these F only.
        """

    @abstractmethod
    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader that computes frames step by step, on the base's device and in its dtype.

        Args:
            base: Lends its embedding.
            fresh: Tokens that an ordinary step adds to a sequence at most.
        """


class SlotReader:
    """What a draft module remembers of the sequences in the engine's slots: by itself, nothing.

    Attributes:
        bounded: Whether drafting looks at `DraftContext.longest`.
        bytes_per_token: Memory that it keeps for each position of a slot.
    """

    bounded = False
    bytes_per_token = 0

    def open(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens and the drafts behind them. Called once."""

    def enter(self, slot: int) -> None:
        """Forget what was read in `slot`: a new sequence enters."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` have what was read of the first `length` tokens in `source`."""

    def move(self, source: int, target: int) -> None:
        """Let the sequence in slot `source` go on in slot `target`."""

    def clear(self, slot: int) -> None:
        """Set all numbers kept for `slot` to zero; see `Drafter.clear`."""

    def prepare(self, context: DraftContext) -> None:
        """Do what drafting must not do. Comes before each step, with the same rows; see `Drafter.prepare`."""


class FrameReader(SlotReader, ABC):
    """Computes frames for the engine's slots."""

    @abstractmethod
    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Return the first `count` frames, or all, `[B, F, d]` of the context's rows; see `Drafter.propose`."""


def hidden_before(hidden: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden state before each anchor, `[B, A, d]`; zeros before the beginning of the text.

    Args:
        hidden: `[B, L, d]`.
        anchors: `[B, A]` positions.
    """
    index = (anchors - 1).clamp_min(0)[:, :, None].expand(-1, -1, hidden.shape[-1])
    return torch.where((anchors > 0)[:, :, None], hidden.gather(1, index), 0.0)


def newest_hidden(context: DraftContext) -> Tensor:
    """Return the hidden state before each row's pending token, `[B, d]`."""
    assert context.hidden is not None
    return hidden_before(context.hidden, context.lengths[:, None])[:, 0]
