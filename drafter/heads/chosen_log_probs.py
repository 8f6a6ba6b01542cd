"""Log-probabilities of a few tokens under an LM head, without holding the logits of the whole vocabulary at once.

A training step needs a handful of tokens at thousands of places. All logits there would be gigabytes with a large
vocabulary, and moving them takes longer than computing them. So the places are processed in portions, whose logits are
dropped at once.

The gradient needs no logits either. With `p` the softmax and `W` the weights of the LM head,

    ∂ log p(v) / ∂ state = W[v] − Σ_w p(w) W[w]

and the sum does not depend on what the backward pass brings. So the forward pass computes it beside the logits, and the
backward pass only adds up a few rows of `W`. These are two products with all of `W`; to compute the logits again in the
backward pass would make three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.heads.draft_vocabulary import OutputLayer

_PORTION = {"cpu": 1 << 19}
"""Logits held at once, by type of device. On a CPU it is what fits into a core's cache."""
_LARGE_PORTION = 1 << 26
_RANKED = 1 << 24
"""Logits held at once where the likeliest are looked for."""
_FEWEST_ROWS = 256
"""Fewest places of a portion. With fewer, a product takes as long as reading the weights."""


def chosen_log_probs(output: OutputLayer, states: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 log-probabilities `[..., K]` of tokens under a frozen LM head.

    Args:
        output: The base, or a head's `output`.
        states: `[..., d]` input of the LM head; it receives the gradient.
        tokens: `[..., K]` int64.
    """
    weight, bias, kind = output.lm_head_weight, output.lm_head_bias, states.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast would convert frozen weights again for every portion.
        weight = weight.to(torch.get_autocast_dtype(kind))
    rows = max(_FEWEST_ROWS, _PORTION.get(kind, _LARGE_PORTION) // len(weight))
    flat = _Chosen.apply(states.flatten(0, -2), tokens.flatten(0, -2), weight, bias, rows)  # type: ignore[no-untyped-call]
    return flat.view(tokens.shape)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Likeliest:
    """The K likeliest tokens at each of M places.

    Args:
        values: `[M, K]` float32 logits, falling.
        tokens: `[M, K]` int64.
    """

    values: Tensor
    tokens: Tensor


@torch.no_grad()
def likeliest_logits(output: OutputLayer, states: Tensor, count: int) -> Likeliest:
    """Return the `count` likeliest tokens at states `[M, d]`, which an LM head reads."""
    rows = max(1, _RANKED // len(output.lm_head_weight))
    best = [output.lm_head(part).float().topk(count, dim=1) for part in states.split(rows)]
    return Likeliest(torch.cat([part.values for part in best]), torch.cat([part.indices for part in best]))


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        trains = ctx.needs_input_grad[0]
        log_probs, likeliest, away = [], [], []
        for part, wanted in zip(states.split(rows), tokens.split(rows), strict=True):
            logits = F.linear(part, weight, bias)
            probs = logits.softmax(1, dtype=torch.float32)
            # The largest logit and its probability give the normaliser, without another pass of exponentials.
            normaliser = logits.amax(1, keepdim=True).float() - probs.amax(1, keepdim=True).log()
            log_probs.append(logits.gather(1, wanted).float() - normaliser)
            if trains:
                # Counted from the row of the likeliest token that is asked for, the mean row keeps its precision where
                # that token is nearly certain: the difference is then small, and so is the gradient.
                likeliest.append(wanted.gather(1, log_probs[-1].argmax(1, keepdim=True)))
                probs.scatter_add_(1, likeliest[-1], torch.full_like(likeliest[-1], -1.0, dtype=torch.float32))
                away.append(probs.to(weight.dtype) @ weight)
        if trains:
            names, places = torch.cat([tokens, torch.cat(likeliest)], 1).unique(return_inverse=True)
            ctx.save_for_backward(weight[names].float(), places, torch.cat(away))
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, places, away = ctx.saved_tensors
        (gradient,) = gradients
        whole = gradient.sum(1, keepdim=True)
        # Σ_k g_k (W[v_k] − mean) = Σ_k g_k W[v_k] − (Σ_k g_k) (W[likeliest] + away)
        signed = torch.cat([gradient, -whole], 1)
        found = F.embedding_bag(places, rows, per_sample_weights=signed, mode="sum") - whole * away
        return found.to(away.dtype), None, None, None, None
