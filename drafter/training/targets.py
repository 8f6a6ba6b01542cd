"""Anchors and targets: where a head is asked to draft, and what the base went on to say.

An anchor is the position of a pending token, in decoding as in training: the base has run every token before it. The
first one is the last prompt token. All targets are the base's own continuation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RegeneratedText:
    """A prompt and the base's own continuation of it.

    Args:
        tokens: Prompt and continuation.
        prompt_length: Tokens of the prompt, at least 1.
    """

    tokens: Sequence[int]
    prompt_length: int

    @property
    def anchors(self) -> range:
        """Positions of pending tokens that have at least one target."""
        return range(self.prompt_length - 1, len(self.tokens) - 1)


@dataclass(frozen=True)
class DraftBatch:
    """What a head trains on in one step.

    Args:
        tokens: `[B, L]` int64, padded on the right.
        anchors: `[B, A]` positions of pending tokens.
        targets: `[B, A, U]` the tokens after each anchor; 0 past the text's end.
        lengths: `[B, A]` valid targets; 0 for an anchor that only fills the row.
    """

    tokens: Tensor
    anchors: Tensor
    targets: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> DraftBatch:
        """The same on `device`."""
        return DraftBatch(*(t.to(device) for t in (self.tokens, self.anchors, self.targets, self.lengths)))


def draft_batch(
    texts: Sequence[RegeneratedText], depth: int, most_anchors: int, rng: random.Random | None = None
) -> DraftBatch:
    """Put texts together; anchors are drawn where a text has more than `most_anchors`.

    Args:
        texts: At least one, each with at least one anchor.
        depth: U, targets an anchor.
        most_anchors: Anchors used of a text.
        rng: Draws anchors; None takes the first ones.
    """
    chosen = []
    for text in texts:
        places = list(text.anchors)
        if len(places) > most_anchors:
            places = sorted(rng.sample(places, most_anchors)) if rng else places[:most_anchors]
        chosen.append(torch.tensor(places))
    width, count = max(len(text.tokens) for text in texts), max(map(len, chosen))
    tokens = torch.zeros(len(texts), width + depth, dtype=torch.long)
    anchors = torch.zeros(len(texts), count, dtype=torch.long)
    lengths = torch.zeros_like(anchors)
    for row, (text, used) in enumerate(zip(texts, chosen, strict=True)):
        tokens[row, : len(text.tokens)] = torch.as_tensor(text.tokens)
        anchors[row, : len(used)] = used
        lengths[row, : len(used)] = (len(text.tokens) - 1 - used).clamp_max(depth)
    return DraftBatch(tokens[:, :width], anchors, _after(tokens, anchors, depth), lengths)


def _after(tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """`[B, A, depth]` the tokens that follow each anchor."""
    index = anchors[:, :, None] + torch.arange(1, depth + 1)
    return tokens[:, None].expand(-1, anchors.shape[1], -1).gather(2, index)
