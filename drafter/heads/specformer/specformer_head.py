"""`specformer`: a chain of tokens in one forward (Shi et al. 2025, arXiv 2511.20340).

It drafts one token for each position and no alternatives. Where many sequences are decoded together there is little
arithmetic to spare, and a chain spends it on the likeliest continuation alone.

The published head predicts through the base's final norm, frozen. Here the norm before the base's LM head is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.heads.chosen_log_probs import chosen_log_probs
from drafter.heads.contract import Tree, check_draft_vocab, check_hidden_layers, check_sizes
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.frame_head import FrameHead
from drafter.heads.losses import Labels, LossSum, cross_entropy
from drafter.heads.specformer.specformer_module import SpecFormerModule
from drafter.search.product import likeliest_chain
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class SpecFormerHeadConfig:
    """Shape of a SpecFormer head.

    Args:
        hidden_size: d, width of the base's hidden states.
        vocab_size: V, size of the base's vocabulary.
        hidden_layers: Hidden states that are fused beside the token's embedding; see `DraftSpec.hidden_layers`.
        depth: U, number of draft positions.
        num_heads: Attention heads; each has an even width.
        intermediate_size: Inner width of the gated MLP.
        rope_theta: Base of the rotary positions.
        depth_decay: Weight of a position's loss relative to the position before it.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.

    Raises:
        ValueError: The sizes do not fit together.
    """

    hidden_size: int
    vocab_size: int
    hidden_layers: tuple[int, ...]
    depth: int = 8
    num_heads: int = 4
    intermediate_size: int = 704
    rope_theta: float = 10_000.0
    depth_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "depth", "num_heads", "intermediate_size", "rope_theta")
        check_draft_vocab(self)
        check_hidden_layers(self)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width")


class SpecFormerHead(FrameHead):
    """Predicts each position independently, and drafts the likeliest token of each."""

    algorithm = "specformer"
    config_class = SpecFormerHeadConfig
    config: SpecFormerHeadConfig

    def __init__(self, config: SpecFormerHeadConfig) -> None:
        super().__init__(config)
        self.hidden_layers = config.hidden_layers
        self.module = SpecFormerModule(
            config.hidden_size,
            config.depth,
            len(config.hidden_layers),
            config.num_heads,
            config.intermediate_size,
            config.rope_theta,
        )
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)

    @classmethod
    def defaults(cls, layers: int) -> dict[str, Any]:
        """Return the published layers: the middle one, the last but one, and what the LM head reads."""
        return {"hidden_layers": tuple(dict.fromkeys((max(0, layers // 2 - 1), max(0, layers - 2), LM_HEAD_INPUT)))}

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """Return the depth-weighted cross-entropy; see `DraftHead.forward`."""
        real = batch.lengths > 0
        states = self.norm(self.module(base.embed(batch.tokens), hidden, batch.anchors)[real])
        labels = self.draft_targets(batch, labels).labels[real]
        log_probs = chosen_log_probs(self.output(base), states, labels.tokens)
        return cross_entropy(log_probs, labels, batch.lengths[real], self.config.depth_decay)

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """Return the chain of the likeliest tokens; see `FrameHead.search`."""
        log_probs = self.output(base).lm_head(self.norm(states)).float().log_softmax(-1)
        return likeliest_chain(log_probs, recent[:, -1], size)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """Return one frame for each node; see `FrameHead.frames_for`."""
        return min(self.config.depth, size - 1)

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` for the static tree."""
        if tree == "static":
            raise ValueError("the static tree needs alternatives at each depth: SpecFormer drafts a chain")
