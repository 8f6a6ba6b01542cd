"""Interface of draft heads: they train, draft, and return the trees that they would draft in known text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from drafter.drafters.contract import Drafter
from drafter.heads.config import Tree as Tree
from drafter.heads.draft_vocabulary import DraftTargets, DraftVocabulary, OutputLayer, draft_vocabulary
from drafter.heads.losses import DraftBatch, Labels, LossSum
from drafter.target.forward import LM_HEAD_INPUT
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree

MOST_DEPTH = 256
"""Levels of a draft tree. Buffers are allocated for the depth that a configuration claims, and no tensor proves it."""


@dataclass(frozen=True)
class Provenance:
    """Origin of a head.

    Args:
        base_name: Hub id or path of its target model.
        base_fingerprint: `BaseModel.fingerprint` of that model.
        training: Recipe, data, steps, seed, results, versions: anything that JSON can hold.
    """

    base_name: str
    base_fingerprint: str
    training: Mapping[str, Any] = field(default_factory=dict)


def check_sizes(config: Any, *names: str) -> None:
    """Raise `ValueError` for the first of the fields `names` that is below 1, or for a `depth` that no tree has."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
        if name == "depth" and config.depth > MOST_DEPTH:
            raise ValueError(f"depth must be at most {MOST_DEPTH}, not {config.depth}")


def check_draft_vocab(config: Any) -> None:
    """Raise `ValueError` if `draft_vocab_size` is not a part of the vocabulary."""
    size, whole = config.draft_vocab_size, config.vocab_size
    if size is not None and not 1 <= size <= whole:
        raise ValueError(f"draft_vocab_size must be from 1 to the size of the vocabulary, {whole}, not {size}")


def check_hidden_layers(config: Any) -> None:
    """Raise `ValueError` if `hidden_layers` is empty or has an invalid layer."""
    if not config.hidden_layers or min(config.hidden_layers) < LM_HEAD_INPUT:
        raise ValueError(f"hidden_layers must name at least one layer, and none below {LM_HEAD_INPUT}")


class DraftHead(nn.Module, ABC):
    """A trainable drafter. Each subclass is one algorithm with a dataclass as its configuration.

    Args:
        config: An instance of `config_class`. It has a `vocab_size`, and a `draft_vocab_size` if the head can draft
            from a part of the vocabulary.

    Attributes:
        vocabulary: Tokens that the head may draft; None for all.
    """

    algorithm: ClassVar[str]
    config_class: ClassVar[type]
    config: Any
    provenance: Provenance | None = None
    """Set by training and by loading. A head without it cannot be saved."""
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)
    """The K hidden states that the head reads, concatenated in this order; see `DraftSpec.hidden_layers`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: DraftVocabulary | None = draft_vocabulary(config)

    @property
    def deepest_layer(self) -> int:
        """Last layer of the target model that the head reads or runs, from 0; negative for none."""
        return max(self.hidden_layers)

    def output(self, base: BaseModel) -> OutputLayer:
        """Return the target model's LM head, or its rows of the draft vocabulary."""
        return base if self.vocabulary is None else self.vocabulary

    def draft_targets(self, batch: DraftBatch, labels: Labels) -> DraftTargets:
        """Return a batch's targets and labels `[B, A, U, K]` in draft ids."""
        if self.vocabulary is None:
            return DraftTargets(batch.targets, batch.lengths, labels)
        return self.vocabulary.targets(batch, labels)

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

    def start_from(self, base: BaseModel) -> None:
        """Initialise weights from the target model. Called once, before training."""

    @abstractmethod
    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """Return the training loss of one batch.

        Args:
            batch: B texts with A anchors each. Anchors without a target do not count.
            hidden: `[B, L, K · d]` hidden states of `hidden_layers`.
            labels: `[B, A, U, K]` what the head should predict for each target.
        """

    @abstractmethod
    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> Drafter:
        """Return a drafter with the head's present weights, on the target model's device and in its dtype.

        Args:
            nodes: Draft tokens of the largest tree.
            tree: `exact` is the best trie under the head's distributions, `static` the published fixed tree.

        Raises:
            ValueError: The head has no such tree; the message says why.
        """

    def weights_changed(self, base: BaseModel) -> None:
        """Recompute, in place, what a drafter of this head derived from weights that were changed in place."""

    @abstractmethod
    def trees_at(
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """Return the trees that decoding would propose at many positions of known text, `[B * A, size]`.

        Args:
            tokens: `[B, L]`.
            hidden: `[B, L, K · d]` hidden states of `hidden_layers`.
            anchors: `[B, A]` positions of the pending tokens.

        Raises:
            ValueError: As in `drafter`.
        """
