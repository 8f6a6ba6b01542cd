"""Interface of draft heads: they train, draft, and return the trees that they would draft in known text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafter.drafters.contract import Drafter, MeasuredWorth
from drafter.drafters.target import OutputLayer, Target
from drafter.heads.config import Tree
from drafter.heads.losses import DraftBatch, Labels, LossSum
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Provenance:
    """Origin of a head: its target model, and how it was trained, as anything that JSON can hold."""

    base_name: str
    base_fingerprint: str
    training: Mapping[str, Any] = field(default_factory=dict)


def measured_worth(origin: Provenance | None) -> MeasuredWorth | None:
    """Return what a head's trees were worth on held-out text when it was saved; None if its origin does not say."""
    try:
        beta = dict(origin.training["history"][-1]["beta"]) if origin is not None else {}
        accepted = {int(nodes): float(tokens) - 1.0 for nodes, tokens in beta.items()}
    except (LookupError, TypeError, ValueError):  # a head's own file may say anything
        return None
    sizes = sorted(accepted)
    if not sizes or sizes[0] < 1 or not all(0 <= accepted[size] <= size for size in sizes):
        return None
    return MeasuredWorth(tuple(sizes), tuple(accepted[size] for size in sizes))


def check_hidden_layers(layers: tuple[int, ...]) -> None:
    """Raise `ValueError` if a configuration's `hidden_layers` are none or have an invalid one."""
    if not layers or min(layers) < LM_HEAD_INPUT:
        raise ValueError(f"hidden_layers must name at least one layer, and none below {LM_HEAD_INPUT}")


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent tokens by `counts` `[V]`, sorted by id; ties go to the lower id."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class DraftVocabulary(nn.Module):
    """Part of the target model's vocabulary that a head may draft: K = `size` of V = `whole` tokens. No parameters.

    `tokens` `[K]` int64, the token of each draft id, is saved with the head. `ids` `[V]` int64 is the draft id of each
    token, -1 for a token outside.
    """

    tokens: Tensor
    ids: Tensor

    def __init__(self, size: int, whole: int) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.arange(size))
        self.register_buffer("ids", torch.full((whole,), -1), persistent=False)

    @torch.no_grad()
    def borrow(self, base: Target) -> None:
        """Copy the tokens' rows of the target model's LM head to its device and dtype. They are not saved.

        A duplicate among `tokens`, or one outside the target model's vocabulary, raises `ValueError`.
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

    @torch.no_grad()
    def borrow_again(self, base: Target) -> None:
        """Copy the same rows into place, of an LM head whose weights have changed."""
        for own, whole in ((self._layer.weight, base.lm_head_weight), (self._layer.bias, base.lm_head_bias)):
            if whole is not None:
                own.copy_(whole[self.tokens.to(whole.device)])

    @property
    def lm_head_weight(self) -> Tensor:
        return self._layer.weight

    @property
    def lm_head_bias(self) -> Tensor | None:
        return self._layer.bias

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self._layer(hidden)  # type: ignore[no-any-return]

    def in_draft_ids(self, batch: DraftBatch, labels: Labels) -> tuple[DraftBatch, Labels]:
        """See `DraftHead.in_draft_ids`."""
        targets, named = self.ids[batch.targets], self.ids[labels.tokens]
        inside = targets >= 0
        lengths = torch.minimum(batch.lengths, inside.long().cumprod(2).sum(2))
        probs = torch.where((named >= 0) & inside[..., None], labels.probs, 0.0)
        drafted = replace(batch, targets=targets.clamp_min(0), lengths=lengths)
        return drafted, Labels(named.clamp_min(0), probs)

    def name_nodes(self, tree: TokenTree) -> TokenTree:
        """Replace a tree's draft ids by tokens. The root has the pending token already."""
        ids = tree.tokens[:, 1:]
        named = torch.where(ids >= 0, self.tokens[ids.clamp_min(0)], ids)
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], named], 1))


class DraftHead(nn.Module, ABC):
    """A trainable drafter. Each subclass is one algorithm with a dataclass as its configuration.

    A configuration has a `vocab_size` and a `depth`, and a `draft_vocab_size` if the head can draft from a part of the
    vocabulary; see `HeadConfig`.
    """

    algorithm: ClassVar[str]
    config_class: ClassVar[type]
    config: Any
    provenance: Provenance | None = None
    """Set by training and by loading. A head without it cannot be saved."""
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)
    """The K hidden states that the head reads, concatenated in this order; see `DraftSpec.hidden_layers`."""
    no_static_tree: str | None = "this head has no static tree"
    """Reason why the head has no static tree; None if it has one."""
    reads_texts: bool = False
    """Whether `trees_at` runs the target model over the tokens instead of reading `hidden`: it sees no images."""
    has_chain: bool = False
    """Whether the head can draft the most probable path alone, which takes less time than a tree."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        size = getattr(config, "draft_vocab_size", None)
        self.vocabulary = None if size is None else DraftVocabulary(size, config.vocab_size)

    @property
    def deepest_layer(self) -> int:
        """Last layer of the target model that the head reads or runs, from 0; negative for none."""
        return max(self.hidden_layers)

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` if the head has no such tree."""
        if tree == "static" and self.no_static_tree is not None:
            raise ValueError(self.no_static_tree)
        if tree == "chain" and not self.has_chain:
            raise ValueError("only a CTC head drafts a chain beside its tree")

    def output(self, base: Target) -> OutputLayer:
        """Return the target model's LM head, or its rows of the draft vocabulary."""
        return base if self.vocabulary is None else self.vocabulary

    def in_draft_ids(self, batch: DraftBatch, labels: Labels) -> tuple[DraftBatch, Labels]:
        """Return a batch with targets, and labels `[B, A, U, K]`, in draft ids.

        Lengths end before the first target outside the draft vocabulary: a loss of prefix probabilities ends there,
        because no tree reaches a later token. Labels outside have probability 0, as have all labels whose target is
        outside; a per-token loss leaves out only these.
        """
        return (batch, labels) if self.vocabulary is None else self.vocabulary.in_draft_ids(batch, labels)

    def base_tokens(self, ids: Tensor) -> Tensor:
        """Return the target model's tokens of draft ids, both `[...]`."""
        return ids if self.vocabulary is None else self.vocabulary.tokens[ids]

    def name_nodes(self, tree: TokenTree) -> TokenTree:
        """Replace a tree's draft ids by tokens."""
        return tree if self.vocabulary is None else self.vocabulary.name_nodes(tree)

    @classmethod
    def defaults(cls, layers: int) -> Mapping[str, Any]:
        """Return the configuration's defaults that depend on the target model's number of layers."""
        return {}

    def start_from(self, base: Target) -> None:
        """Initialise weights from the target model. Called once, before training."""

    @abstractmethod
    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """Return the training loss of one batch of `labels` `[B, A, U, K]`. Anchors without a target do not count.

        `hidden` `[B, L, K · d]` are the hidden states of `hidden_layers`.
        """

    @abstractmethod
    def drafter(self, base: Target, nodes: int, tree: Tree = "exact") -> Drafter:
        """Return a drafter with the head's present weights, on the target model's device and in its dtype.

        `nodes` are the draft tokens of its largest tree. It raises what `refuse_tree` does.
        """

    def weights_changed(self, base: Target) -> None:
        """Recompute, in place, what a drafter of this head derived from weights that were changed in place."""

    @abstractmethod
    def trees_at(
        self, base: Target, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """Return the trees `[B * A, size]` that decoding would propose at `anchors` `[B, A]` of tokens `[B, L]`.

        `hidden` `[B, L, K · d]` are the hidden states of `hidden_layers`. It raises what `refuse_tree` does.
        """
