"""Soft labels: the base's likeliest tokens at each place of a text.

A text shows only one continuation of each prefix, and the base's distribution shows them all. In a sampled text the
likeliest token is the one that greedy decoding would choose there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import Labels

_CHUNK = 512
"""Number of positions whose logits are in memory at once."""


@torch.no_grad()
def teacher_labels(base: BaseModel, batch: DraftBatch, hidden: Tensor, count: int, temperature: float) -> Labels:
    """Return the base's K likeliest tokens at each target as labels `[B, A, U, K]`.

    Some model families scale or soft-cap logits behind the LM head. The labels leave this out, as the heads that borrow
    the LM head do: the order of the tokens is right, but the weights are sharper or flatter.

    Args:
        base: The base.
        batch: The texts and anchors.
        hidden: `[B, L, d]` the base's last hidden states of the texts.
        count: K. With 1 the label is the token that greedy decoding chooses.
        temperature: Temperature of the softmax over the K logits, which gives the weights.
    """
    best = [base.lm_head(chunk).float().div(temperature).topk(count, dim=2) for chunk in hidden.split(_CHUNK, 1)]
    tokens = torch.cat([part.indices for part in best], 1)
    probs = torch.cat([part.values for part in best], 1).softmax(2)
    # The state at a place gives the distribution of the next token: target u of an anchor comes from anchor + u - 1.
    depth = torch.arange(batch.targets.shape[2], device=hidden.device)
    place = (batch.anchors[:, :, None] + depth).clamp_max(hidden.shape[1] - 1)
    index = place.flatten(1)[:, :, None].expand(-1, -1, count)
    shape = (*place.shape, count)
    return Labels(tokens.gather(1, index).view(shape), probs.gather(1, index).view(shape))
