"""Soft labels: the base's likeliest tokens at each place of a text.

A text shows only one continuation of each prefix, and the base's distribution shows them all. In a sampled text the
likeliest token is the one that greedy decoding would choose there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.contract import DraftHead
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import Labels

_PORTION = 1 << 24
"""Number of logits in memory at once."""


@torch.no_grad()
def teacher_labels(
    base: BaseModel, head: DraftHead, batch: DraftBatch, hidden: Tensor, count: int, temperature: float
) -> Labels:
    """Return the base's K likeliest tokens at each target as labels `[B, A, U, K]`.

    With a draft vocabulary they are the likeliest of its tokens, and the weights are those given that one of these
    follows: a head cannot say that none does.

    Some model families scale or soft-cap logits behind the LM head. The labels leave this out, as the heads that borrow
    the LM head do: the order of the tokens is right, but the weights are sharper or flatter.

    Args:
        base: The base.
        head: The head that learns from the labels.
        batch: The texts and anchors.
        hidden: `[B, L, d]` the base's last hidden states of the texts.
        count: K. With 1 the label is the token that greedy decoding chooses.
        temperature: Temperature of the softmax over the K logits, which gives the weights.
    """
    # The state at a place gives the distribution of the next token: target u of an anchor comes from anchor + u - 1.
    depth = torch.arange(batch.targets.shape[2], device=hidden.device)
    place = (batch.anchors[:, :, None] + depth).clamp_max(hidden.shape[1] - 1)
    row = torch.arange(len(hidden), device=hidden.device)[:, None, None] * hidden.shape[1]
    # Anchors share most of their places, and nobody asks about a prompt's.
    asked, where = (row + place).unique(return_inverse=True)
    output = head.output(base)
    rows = max(1, _PORTION // len(output.lm_head_weight))
    best = [
        output.lm_head(part).float().div(temperature).topk(count, dim=1)
        for part in hidden.flatten(0, 1)[asked].split(rows)
    ]
    tokens = head.base_tokens(torch.cat([part.indices for part in best]))
    probs = torch.cat([part.values for part in best]).softmax(1)
    return Labels(tokens[where], probs[where])
