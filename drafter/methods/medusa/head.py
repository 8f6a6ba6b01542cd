"""`medusa`: residual blocks on the last hidden state, each with an output layer (Cai et al. 2024, arXiv 2401.10774)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter.ctc.prefix_search import static_tree
from drafter.heads.contract import Tree, check_draft_vocab, check_sizes
from drafter.heads.frame_head import FrameHead, ResidualBlocks
from drafter.heads.losses import DraftBatch, Labels, LossSum, cross_entropy
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree, best_product_trie


@dataclass(frozen=True)
class MedusaHeadConfig:
    """Shape of Medusa heads.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        depth: U, number of heads and of levels of a tree.
        depth_decay: Weight of a head's loss relative to the head before it; 0.8 as published.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.

    Raises:
        ValueError: A size is below 1, or the draft vocabulary is larger than the vocabulary.
    """

    hidden_size: int
    vocab_size: int
    depth: int = 6
    depth_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "depth")
        check_draft_vocab(self)


class MedusaHead(FrameHead):
    """Heads that do not see each other's tokens."""

    algorithm = "medusa"
    config_class = MedusaHeadConfig
    config: MedusaHeadConfig

    def __init__(self, config: MedusaHeadConfig) -> None:
        super().__init__(config)
        self.module = ResidualBlocks(config.hidden_size, config.depth)
        self.outputs = nn.Parameter(
            torch.empty(config.depth, config.draft_vocab_size or config.vocab_size, config.hidden_size)
        )
        nn.init.normal_(self.outputs, std=config.hidden_size**-0.5)

    def start_from(self, base: BaseModel) -> None:
        """Initialise every output layer with the target model's LM head."""
        with torch.no_grad():
            self.outputs.copy_(self.output(base).lm_head_weight.expand_as(self.outputs))

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        real = batch.lengths > 0
        states = self.module(base.embed(batch.tokens), hidden, batch.anchors)[real]
        labels = self.draft_targets(batch, labels).labels[real]
        log_probs = self.log_probs(states).gather(2, labels.tokens)
        return cross_entropy(log_probs, labels, batch.lengths[real], self.config.depth_decay)

    def log_probs(self, states: Tensor) -> Tensor:
        """Return float32 log-probabilities `[N, F, V]` of the first F frame states `[N, F, d]`."""
        outputs = self.outputs[: states.shape[1]].to(states.dtype)
        logits = torch.bmm(states.transpose(0, 1), outputs.transpose(1, 2))
        return logits.transpose(0, 1).float().log_softmax(-1)

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """Return the best trie of the heads' product, or the published tree; see `FrameHead.search`."""
        if tree == "static":
            return static_tree(self.log_probs(states), recent[:, -1], self.config.depth, size, blank=False)
        return best_product_trie(self.log_probs(states), recent[:, -1], size)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        return min(self.config.depth, size - 1) if tree == "exact" else None
