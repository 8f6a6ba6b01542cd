"""Soft labels: what the base itself finds likely at each place of a text.

The text shows one continuation; the base's distribution says more at every place, and where the text was sampled, the
likeliest token is what greedy decoding would say there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import Labels

_CHUNK = 512
"""Positions whose logits are in memory at once."""


@torch.no_grad()
def teacher_labels(base: BaseModel, batch: DraftBatch, hidden: Tensor, count: int, temperature: float) -> Labels:
    """The base's `count` likeliest tokens at each target, `[B, A, U, count]`, their weights of sum 1.

    What some families do to logits behind the LM head (scaling, soft-capping) is left out, in the labels as in the
    heads that borrow the LM head: the order of tokens is right, the weights are sharper or flatter.

    Args:
        base: The base.
        batch: The texts and anchors.
        hidden: `[B, L, d]` the base's last hidden states of the texts.
        count: K. With 1 the label is what greedy decoding says there.
        temperature: Of the softmax that gives the weights.
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
