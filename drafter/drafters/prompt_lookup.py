"""Prompt lookup: what followed earlier occurrences of a text's last tokens (Saxena 2023, *Prompt Lookup Decoding*)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.tree.token_tree import PAD_TOKEN

_ORDER = 3
_DISCOUNT = 0.4  # weight of a match one token shorter (Brants et al. 2007, *stupid backoff*).
FADING = 0.85
"""Share of prefixes that hold for one more token. The budget calibrates probabilities, so only their order matters."""


def lookup(tokens: Tensor, lengths: Tensor, depth: int, matches: int) -> tuple[Tensor, Tensor]:
    """Return continuations of the best earlier matches of each row's last tokens: longest first, then newest.

    Args:
        tokens: `[B, L]`; `tokens[b, lengths[b]]` is the row's last token.
        lengths: `[B]`.

    Returns:
        Paths `[B, P = matches, U = depth]`, `PAD_TOKEN` past the row's text, and log weights `[B, P]`, -inf where there
        is no match.
    """
    batch, width = tokens.shape
    index = torch.arange(width, device=tokens.device)
    matched = torch.zeros_like(tokens)  # tokens ending here that equal the row's last ones
    alive = index < lengths[:, None]
    for back in range(_ORDER):
        suffix = tokens.gather(1, (lengths - back).clamp_min(0)[:, None])
        shifted = tokens if back == 0 else F.pad(tokens, (back, 0), value=PAD_TOKEN)[:, :width]
        alive = alive & (shifted == suffix) & (lengths >= back)[:, None]
        matched = matched + alive
    score = matched * width + index
    best, where = torch.where(matched > 0, score, -1).topk(min(matches, width), dim=1)
    follow = where[:, :, None] + torch.arange(1, depth + 1, device=tokens.device)
    known = (follow <= lengths[:, None, None]) & (best >= 0)[:, :, None]
    paths = tokens.gather(1, follow.clamp_max(width - 1).flatten(1)).view(batch, -1, depth)
    length = torch.div(best, width, rounding_mode="floor")
    log_weight = (_ORDER - length) * math.log(_DISCOUNT)
    return paths.masked_fill(~known, PAD_TOKEN), log_weight.masked_fill(best < 0, -torch.inf)
