"""The tokens that a head may draft: all of the base's, or only the most frequent ones.

An LM head over many frames costs as much as the base itself if the vocabulary is large, in training and in decoding.
But a small part of the vocabulary makes up nearly all of a text. So a head may have a *draft vocabulary*: losses and
searches see its tokens alone, numbered from 0 (*draft ids*), and the LM head has a row for each of them. All other
tokens are never drafted. The base generates them all the same, because its choice does not depend on the drafter.

The head's weights hold the token of each draft id. All else follows from it and from the base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.losses import Labels
from drafter.tree.token_tree import TokenTree


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
