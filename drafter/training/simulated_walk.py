"""β without decoding: walks the head's trees along text that the target model generated at temperature 0.

There decoding would follow the text itself, so a few large forwards make the trees for all positions of many texts.
Checkpoints are chosen by this β instead of the loss, because β decides how fast decoding is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.target.model import BaseModel
from drafter.training.settings import NODE_COUNTS
from drafter.training.targets import RegeneratedText, base_hidden_states, draft_batch
from drafter.tree.token_tree import TokenTree


@dataclass
class Walks:
    """Sums over walks: decode steps by number of draft tokens, initially 0 of each, and new tokens."""

    steps: dict[int, int]
    tokens: int = 0

    @property
    def beta(self) -> dict[int, float]:
        return {nodes: self.tokens / steps for nodes, steps in self.steps.items()}

    @torch.no_grad()
    def add(self, head: DraftHead, base: BaseModel, batch: DraftBatch, tree: Tree = "exact") -> None:
        """Count the walks through a batch of `walked_batches`.

        The batch's hidden states, if any, begin with those that the head reads.
        """
        batch, counts = batch.to(base.device), list(self.steps)
        if batch.hidden is None:
            hidden = base_hidden_states(base, batch.tokens, head.hidden_layers)
        else:
            hidden = batch.hidden[..., : len(head.hidden_layers) * base.hidden_size].to(base.dtype)
        trees = head.trees_at(base, batch.tokens, hidden, batch.anchors, max(counts) + 1, tree)
        accepted = accepted_depths(trees, batch.targets.flatten(0, 1), batch.lengths.flatten(), counts)
        table = accepted.view(len(counts), *batch.anchors.shape).tolist()
        for row, count in enumerate((batch.lengths > 0).sum(1).tolist()):
            self.tokens += count
            for nodes, depths in zip(counts, table, strict=True):
                at = 0
                while at < count:
                    at += depths[row][at] + 1
                    self.steps[nodes] += 1


@torch.no_grad()
def simulated_beta(
    head: DraftHead,
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    node_counts: Sequence[int] = NODE_COUNTS,
    tree: Tree = "exact",
    texts_at_once: int = 4,
) -> dict[int, float]:
    """Return β by number of draft tokens: new tokens per target forward over greedy walks through held-out `texts`.

    Smaller trees are leading slices of the largest.
    """
    training = head.training
    head.eval()
    walks = Walks(dict.fromkeys(node_counts, 0))
    for batch in walked_batches(texts, head.config.depth, texts_at_once):
        walks.add(head, base, batch, tree)
    head.train(training)
    return walks.beta


def accepted_depths(tree: TokenTree, targets: Tensor, lengths: Tensor, node_counts: Sequence[int]) -> Tensor:
    """Return the acceptance length in each leading slice of each tree `[N, S]`, `[len(node_counts), N]`.

    `targets` `[N, U]` are the tokens that the target model generates after the root, `lengths` `[N]` of them valid.
    """
    slot = (tree.depths - 1).clamp_min(0)
    right = (tree.tokens == targets.gather(1, slot)) & (tree.depths <= lengths[:, None])
    right[:, 0] = True
    on_path = (right[:, None] | ~tree.ancestors()).all(2)
    depths = torch.where(on_path, tree.depths, 0)
    return torch.stack([depths[:, : count + 1].amax(1) for count in node_counts])


def walked_batches(texts: Sequence[RegeneratedText], depth: int, at_once: int) -> Iterator[DraftBatch]:
    """Yield texts as batches of `at_once` with an anchor at each position, texts of similar length together."""
    ordered = sorted((text for text in texts if len(text.anchors)), key=lambda text: len(text.tokens))
    for start in range(0, len(ordered), at_once):
        group = ordered[start : start + at_once]
        yield draft_batch(group, depth, most_anchors=max(len(text.anchors) for text in group))
