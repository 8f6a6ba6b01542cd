"""Log-probabilities of a few tokens under an LM head, without holding the logits of the whole vocabulary at once.

A training step needs a handful of tokens at thousands of places. All logits there would be gigabytes with a large
vocabulary, and moving them takes longer than computing them. So the places are processed in portions that stay in
cache, and the backward pass computes the logits of each portion again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel

_PORTION = {"cpu": 1 << 19}
"""Logits held at once, by type of device. On a CPU it is what fits into a core's cache."""
_LARGE_PORTION = 1 << 26


def chosen_log_probs(base: BaseModel, states: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 log-probabilities `[..., K]` of tokens under the base's LM head.

    Args:
        base: Lends its frozen LM head.
        states: `[..., d]` input of the LM head; it receives the gradient.
        tokens: `[..., K]` int64.
    """
    rows = max(1, _PORTION.get(base.device.type, _LARGE_PORTION) // base.vocab_size)
    flat = _Chosen.apply(states.flatten(0, -2), tokens.flatten(0, -2), base, rows)  # type: ignore[no-untyped-call]
    return flat.view(tokens.shape)  # type: ignore[no-any-return]


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor, base: BaseModel, rows: int) -> Tensor:
        ctx.base, ctx.rows = base, rows
        kind = states.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        chosen, normalisers = [], []
        for part, wanted in zip(states.split(rows), tokens.split(rows), strict=True):
            logits = base.lm_head(part).float()
            normalisers.append(logits.logsumexp(1, keepdim=True))
            chosen.append(logits.gather(1, wanted) - normalisers[-1])
        ctx.save_for_backward(states, tokens, torch.cat(normalisers))
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        states, tokens, normalisers = ctx.saved_tensors
        parts = []
        for state, wanted, normaliser, gradient in zip(
            *(tensor.split(ctx.rows) for tensor in (states, tokens, normalisers, gradients[0])), strict=True
        ):
            state = state.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                logits = ctx.base.lm_head(state)
            # d log p(v) / d logit(w) = [v = w] − p(w)
            outer = (logits.detach().float() - normaliser).exp_().mul_(-gradient.sum(1, keepdim=True))
            outer.scatter_add_(1, wanted, gradient)
            parts.append(torch.autograd.grad(logits, state, outer.to(logits.dtype))[0])
        return torch.cat(parts), None, None, None
