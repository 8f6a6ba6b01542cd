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

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.heads.losses import DraftBatch, Labels
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree

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


# ---- The tokens that a head may draft: all of the base's, or only the most frequent ones.


class OutputLayer(Protocol):
    """A frozen layer from states to logits of V tokens. `BaseModel` is one, and so is `DraftVocabulary`."""

    @property
    def lm_head_weight(self) -> Tensor:
        """`[V, d]`."""

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[V]`, if there is one."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of `hidden` `[..., d]`."""


@dataclass(frozen=True)
class DraftTargets:
    """What a head should learn, in draft ids.

    Args:
        tokens: `[B, A, U]` the text after each anchor; any valid id for a token outside the draft vocabulary.
        lengths: `[B, A]` number of targets before the first one outside. A loss of prefix probabilities ends there: the
            frames cannot emit that token, so no tree has it, and no later place is ever reached through it.
        labels: `[B, A, U, K]`. Labels outside have the probability 0, and so have all labels of a place whose own token
            is outside. A loss that treats each place by itself leaves out these places alone.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Labels


class DraftVocabulary(nn.Module):
    """The part of the base's vocabulary that a head may draft. It has no parameters.

    Args:
        size: K, number of tokens.
        whole: V, size of the base's vocabulary.

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
        """Take the most frequent tokens.

        Args:
            counts: `[V]` how often each token occurs in the base's own answers.
        """
        self.tokens.copy_(most_frequent(counts, len(self.tokens)))

    @torch.no_grad()
    def borrow(self, base: BaseModel) -> None:
        """Copy the tokens' rows of the base's LM head, on the base's device and in its dtype. They are not saved.

        Raises:
            ValueError: `tokens` names a token twice, or one that the base does not have.
        """
        tokens = self.tokens
        if int(tokens.min()) < 0 or int(tokens.max()) >= len(self.ids) or len(tokens.unique()) < len(tokens):
            raise ValueError(f"its draft vocabulary must be different tokens from 0 to {len(self.ids) - 1}")
        self.ids.fill_(-1)
        self.ids[tokens] = torch.arange(len(tokens), device=tokens.device)
        weight, bias = base.lm_head_weight, base.lm_head_bias
        layer = nn.Linear(weight.shape[1], len(tokens), bias=False, device="meta")
        # Buffers go wherever the head goes, and neither an optimiser nor a checkpoint takes them for the head's own.
        del layer.weight, layer.bias
        rows = tokens.to(weight.device)
        layer.register_buffer("weight", weight[rows].to(base.device), persistent=False)
        layer.register_buffer("bias", None if bias is None else bias[rows].to(base.device), persistent=False)
        self._layer = layer

    # ---- the LM head over the draft vocabulary

    @property
    def lm_head_weight(self) -> Tensor:
        """`[K, d]`."""
        return self._layer.weight

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[K]`, if the base's LM head has a bias."""
        return self._layer.bias

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., K]` of `hidden` `[..., d]`."""
        return self._layer(hidden)  # type: ignore[no-any-return]

    # ---- from tokens to draft ids and back

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
        """Return a tree of tokens, of one whose draft nodes have draft ids. The root has the pending token already."""
        ids = tree.tokens[:, 1:]
        named = torch.where(ids >= 0, self.tokens[ids.clamp_min(0)], ids)
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], named], 1))


def draft_vocabulary(config: Any) -> DraftVocabulary | None:
    """Return the draft vocabulary that a head's configuration asks for; None if it drafts all tokens."""
    size = getattr(config, "draft_vocab_size", None)
    return None if size is None else DraftVocabulary(size, config.vocab_size)


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent tokens in the order of their ids, `[size]`. Of equal counts the lower id wins.

    Args:
        counts: `[V]` how often each token occurs.
        size: At most V.
    """
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
