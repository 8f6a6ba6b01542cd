"""Training batches, labels and losses of all heads, and log-probabilities under an LM head at bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.drafters.target import OutputLayer


@dataclass(frozen=True)
class DraftBatch:
    """Texts, anchors in them where the head drafts, and the tokens that follow.

    Args:
        tokens: `[B, L]` int64 texts, padded on the right.
        anchors: `[B, A]` positions of the pending tokens.
        targets: `[B, A, U]` the tokens after each anchor; 0 past the end of the text.
        lengths: `[B, A]` number of valid targets; 0 for a padding anchor.
        hidden: `[B, L, K · d]` stored hidden states of `training_layers`; None lets the training step compute them.
    """

    tokens: Tensor
    anchors: Tensor
    targets: Tensor
    lengths: Tensor
    hidden: Tensor | None = None

    def to(self, device: torch.device) -> DraftBatch:
        return DraftBatch(*(None if one is None else one.to(device) for one in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LossSum:
    """Sum of weighted terms in nats, and of their weights; data-parallel workers divide by all workers' weight."""

    total: Tensor
    weight: Tensor

    def mean(self) -> Tensor:
        """Return the weighted mean in nats; 0 without terms."""
        return self.total / self.weight.clamp_min(1e-9)


@dataclass(frozen=True)
class Labels:
    """Labels `[..., K]` of each target: int64 tokens, and float32 probabilities that sum to 1 over K."""

    tokens: Tensor
    probs: Tensor

    def __getitem__(self, index: Tensor) -> Labels:
        return Labels(self.tokens[index], self.probs[index])


def hard_labels(targets: Tensor) -> Labels:
    """Return labels with K = 1 and probability 1 of `targets` `[...]`."""
    tokens = targets[..., None]
    return Labels(tokens, torch.ones_like(tokens, dtype=torch.float32))


def cross_entropy(log_probs: Tensor, labels: Labels, lengths: Tensor, decay: float) -> LossSum:
    """Return `−Σ_u decay^u Σ_k q_uk log p_u(v_uk)`, for heads whose `u`-th distribution predicts the `u`-th token.

    `log_probs` `[N, U, K]` are those of the labels, valid at the first `lengths` `[N]` positions. A position whose
    labels all have probability 0 does not count.
    """
    place = torch.arange(log_probs.shape[1], device=lengths.device)
    counted = (place < lengths[:, None]) & (labels.probs > 0).any(2)
    weights = counted * decay ** place.to(log_probs.dtype)
    return LossSum(-(weights * (labels.probs * log_probs).sum(2)).sum(), weights.sum())


_PORTION = {"cpu": 1 << 19}  # logits held at once, by device type. On a CPU this fits a core's cache.
_LARGE_PORTION = 1 << 26
_RANKED = 1 << 24  # logits held at once by `likeliest_logits`
_FEWEST_ROWS = 256  # fewest rows of a portion. With fewer, a product takes as long as reading the weights.


def chosen_log_probs(output: OutputLayer, states: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 log-probabilities of `tokens`, `[..., K]` int64, under a frozen LM head.

    Gradients flow to `states` `[..., d]`, the input of the LM head.
    """
    weight, kind = output.lm_head_weight, states.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast would convert frozen weights again for every portion.
        weight = weight.to(torch.get_autocast_dtype(kind))
    rows = max(_FEWEST_ROWS, _PORTION.get(kind, _LARGE_PORTION) // len(weight))
    flat = _Chosen.apply(states.flatten(0, -2), tokens.flatten(0, -2), weight, output.lm_head_bias, rows)  # type: ignore[no-untyped-call]
    return flat.view(tokens.shape)  # type: ignore[no-any-return]


@torch.no_grad()
def likeliest_logits(output: OutputLayer, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return logits, descending, and ids of the K most probable tokens, both `[M, K]`, for states `[M, d]`."""
    rows = max(1, _RANKED // len(output.lm_head_weight))
    best = [output.lm_head(part).float().topk(count, dim=1) for part in states.split(rows)]
    return torch.cat([part.values for part in best]), torch.cat([part.indices for part in best])


class _Chosen(torch.autograd.Function):
    """`chosen_log_probs`, portion by portion, because all logits of a training step would be gigabytes.

    The gradient `∂ log p(v) / ∂ state = W[v] − Σ_w p(w) W[w]` needs no logits either: the sum does not depend on the
    incoming gradient, so the forward pass computes it. That is two products with all of `W`; recomputing the logits in
    the backward pass would take three.
    """

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
                # Relative to the row of the most probable asked token, the mean row keeps its precision where that
                # token is nearly certain and the gradient is small.
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
