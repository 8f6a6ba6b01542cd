"""Soft labels: the base's likeliest tokens at each place of a text.

A text shows only one continuation of each prefix, and the base's distribution shows them all. In a sampled text the
likeliest token is the one that greedy decoding would choose there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.chosen_log_probs import likeliest_logits
from drafter.heads.contract import DraftHead
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import Labels


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
    best = likeliest_logits(head.output(base), hidden.flatten(0, 1)[asked], count)
    tokens, probs = head.base_tokens(best.tokens), best.values.div(temperature).softmax(1)
    return Labels(tokens[where], probs[where])
