"""Vocabulary that a head may draft, and log-probabilities of a few tokens under an LM head at bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.heads.losses import DraftBatch, Labels
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree

_PORTION = {"cpu": 1 << 19}
"""Logits held at once, by device type. On a CPU this fits a core's cache."""
_LARGE_PORTION = 1 << 26
_RANKED = 1 << 24
"""Logits held at once by `likeliest_logits`."""
_FEWEST_ROWS = 256
"""Fewest rows of a portion. With fewer, a product takes as long as reading the weights."""


def chosen_log_probs(output: OutputLayer, states: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 log-probabilities of `tokens`, `[..., K]` int64, under a frozen LM head.

    Gradients flow to `states` `[..., d]`, the input of the LM head.
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
    """The K most probable tokens of each of M rows: float32 logits, descending, and int64 ids, both `[M, K]`."""

    values: Tensor
    tokens: Tensor


@torch.no_grad()
def likeliest_logits(output: OutputLayer, states: Tensor, count: int) -> Likeliest:
    """Return the `count` most probable tokens under an LM head for states `[M, d]`."""
    rows = max(1, _RANKED // len(output.lm_head_weight))
    best = [output.lm_head(part).float().topk(count, dim=1) for part in states.split(rows)]
    return Likeliest(torch.cat([part.values for part in best]), torch.cat([part.indices for part in best]))


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


class OutputLayer(Protocol):
    """Frozen layer from states to logits of V tokens: `BaseModel` or `DraftVocabulary`."""

    @property
    def lm_head_weight(self) -> Tensor:
        """`[V, d]`."""

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[V]`, or None."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of `hidden` `[..., d]`."""


@dataclass(frozen=True)
class DraftTargets:
    """Training targets in draft ids.

    Args:
        tokens: `[B, A, U]` targets; any valid id for a token outside the draft vocabulary.
        lengths: `[B, A]` number of targets before the first one outside. A loss of prefix probabilities ends there,
            because no tree reaches a later token.
        labels: `[B, A, U, K]`. Labels outside have probability 0, as have all labels whose target is outside; a
            per-token loss leaves out only these.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Labels


class DraftVocabulary(nn.Module):
    """Part of the target model's vocabulary that a head may draft. It has no parameters.

    Args:
        size: K, number of tokens.
        whole: V, size of the target model's vocabulary.

    Attributes:
        tokens: `[K]` int64 token of each draft id. It is saved with the head.
        ids: `[V]` int64 draft id of each token, -1 for a token outside.
    """

    tokens: Tensor
    ids: Tensor

    def __init__(self, size: int, whole: int) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.arange(size))
        self.register_buffer("ids", torch.full((whole,), -1), persistent=False)

    def choose(self, counts: Tensor) -> None:
        """Take the most frequent tokens by `counts` `[V]`, their frequencies in the target model's own answers."""
        self.tokens.copy_(most_frequent(counts, len(self.tokens)))

    @torch.no_grad()
    def borrow(self, base: BaseModel) -> None:
        """Copy the tokens' rows of the target model's LM head to its device and dtype. They are not saved.

        Raises:
            ValueError: `tokens` has a duplicate, or a token outside the target model's vocabulary.
        """
        tokens = self.tokens
        if int(tokens.min()) < 0 or int(tokens.max()) >= len(self.ids) or len(tokens.unique()) < len(tokens):
            raise ValueError(f"its draft vocabulary must be different tokens from 0 to {len(self.ids) - 1}")
        self.ids.fill_(-1)
        self.ids[tokens] = torch.arange(len(tokens), device=tokens.device)
        weight, bias = base.lm_head_weight, base.lm_head_bias
        layer = nn.Linear(weight.shape[1], len(tokens), bias=False, device="meta")
        # Buffers move with the head, but neither the optimiser nor a checkpoint takes them.
        del layer.weight, layer.bias
        rows = tokens.to(weight.device)
        layer.register_buffer("weight", weight[rows].to(base.device), persistent=False)
        layer.register_buffer("bias", None if bias is None else bias[rows].to(base.device), persistent=False)
        self._layer = layer

    @property
    def lm_head_weight(self) -> Tensor:
        """`[K, d]`."""
        return self._layer.weight

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[K]`, or None."""
        return self._layer.bias

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., K]` of `hidden` `[..., d]`."""
        return self._layer(hidden)  # type: ignore[no-any-return]

    def targets(self, batch: DraftBatch, labels: Labels) -> DraftTargets:
        """Return a batch's targets and labels in draft ids."""
        tokens, named = self.ids[batch.targets], self.ids[labels.tokens]
        inside = tokens >= 0
        drafted = inside.long().cumprod(2).sum(2)
        probs = torch.where((named >= 0) & inside[..., None], labels.probs, 0.0)
        return DraftTargets(
            tokens.clamp_min(0), torch.minimum(batch.lengths, drafted), Labels(named.clamp_min(0), probs)
        )

    def name_nodes(self, tree: TokenTree) -> TokenTree:
        """Replace a tree's draft ids by tokens. The root has the pending token already."""
        ids = tree.tokens[:, 1:]
        named = torch.where(ids >= 0, self.tokens[ids.clamp_min(0)], ids)
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], named], 1))


def draft_vocabulary(config: Any) -> DraftVocabulary | None:
    """Return the draft vocabulary that a head's configuration asks for; None for all tokens."""
    size = getattr(config, "draft_vocab_size", None)
    return None if size is None else DraftVocabulary(size, config.vocab_size)


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent tokens by `counts` `[V]`, sorted by id, `[size]`; ties go to the lower id."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
