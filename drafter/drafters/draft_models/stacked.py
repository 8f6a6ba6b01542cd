"""`stack:A>model:B`: drafters one above another (hierarchical speculative decoding, HSD, arXiv 2510.19705).

The lower drafter's tree goes through the model above it in one forward. That model gives each node its own probability,
adds its own best continuations, and passes on the best of all. The base verifies what is left, so nothing of this can
change a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftMemory, DraftSpec, Ids, Loan
from drafter.drafters.draft_models.text_reader import TextReader
from drafter.errors import LoadError
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import from_nodes

LOWER_NODES = 2
"""Nodes that the lower drafter is asked for, for each one that is passed on."""
_OWN_CHILDREN = 4
"""Continuations that the model adds after the pending token and after each node."""


class StackedDrafter(Drafter):
    """Lets a draft model price, cut and extend the trees of a lower drafter.

    Args:
        lower: Proposes; it may be a stack itself. It should have `LOWER_NODES` times as many nodes.
        model: The draft model above it, with the base's tokeniser, on any device.
        base: The base that they draft for.
        nodes: Draft nodes of the largest tree.

    Raises:
        LoadError: The lower drafter drafts in the base's own KV cache.
    """

    def __init__(self, lower: Drafter, model: BaseModel, base: BaseModel, nodes: int) -> None:
        if lower.spec.shared_layers:
            raise LoadError(
                "the base's own layers cannot draft for a stack: the base's KV cache has no room for its trees"
            )
        self.lower = lower
        spec, depth = lower.spec, min(lower.spec.max_depth + 1, nodes)
        self._reader = TextReader(model, base, depth + 1)
        self.spec = DraftSpec(
            nodes,
            depth,
            hidden_layers=spec.hidden_layers,
            graph_safe=spec.graph_safe and model.device == base.device,
            lossless_only=spec.lossless_only,
            bytes_per_token=spec.bytes_per_token
            + (sum(model.kv_bytes_per_token) if model.device == base.device else 0),
        )
        self._device = model.device

    def open(self, loan: Loan) -> None:
        """Open the lower drafter, and allocate the model's KV cache."""
        self._times = loan.times
        self.lower.open(loan)
        self._reader.open(loan.slots, loan.length, self.lower.spec.max_nodes)

    def enter(self, slot: int, text: Ids) -> None:
        """Tell both."""
        self.lower.enter(slot, text)
        self._reader.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy in both."""
        self.lower.copy(source, target, length)
        self._reader.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        """Move in both."""
        self.lower.move(source, target)
        self._reader.move(source, target)

    def clear(self, slot: int) -> None:
        """Clear both."""
        self.lower.clear(slot)
        self._reader.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Prepare both."""
        self.lower.prepare(context)
        self._reader.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Let the lower drafter propose, run the model over its nodes, and return the best `[B, 1 + ask.nodes]`."""
        wanted = min(LOWER_NODES * ask.nodes, self.lower.spec.max_nodes)
        drafted = self.lower.propose(context, Ask(wanted, ask.least_probability / LOWER_NODES))
        here = TokenTree(*(part.to(self._device) for part in vars(drafted).values()))
        tree = reprice(here, self._reader.read(context, here), _OWN_CHILDREN, self.spec.max_depth, ask.nodes + 1)
        self._times.mark("draft")
        return TokenTree(*(part.to(context.tokens.device) for part in vars(tree).values()))

    def observe(self, committed: Committed) -> None:
        """Tell the lower drafter; the model reads what it must by itself."""
        self.lower.observe(committed)

    @property
    def memory(self) -> DraftMemory:
        """That of the lower drafter."""
        return self.lower.memory

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        """Tell the lower drafter."""
        self.lower.remember(texts)


def reprice(tree: TokenTree, log_probs: Tensor, own: int, depth: int, size: int) -> TokenTree:
    """Return the best trees under a model's own probabilities, out of a tree's nodes and the model's continuations.

    Args:
        tree: `[B, N]` what was drafted, root included.
        log_probs: `[B, N, V]` of the token after each node.
        own: How many of the model's best children each node gets.
        depth: No node of the result lies deeper.
        size: Nodes of each resulting tree, root included.
    """
    count = tree.size
    place = tree.parents * log_probs.shape[2] + tree.tokens.clamp(0, log_probs.shape[2] - 1)
    conditional = log_probs.flatten(1).gather(1, place)
    conditional = torch.where(tree.tokens >= 0, conditional, -torch.inf)
    conditional[:, 0].zero_()
    # All paths are summed in the same order, so that rounding never puts a child above its parent.
    paths = torch.where(tree.ancestors(), conditional[:, None], 0.0).sum(2)
    best, tokens = log_probs.topk(min(own, log_probs.shape[2]))
    each = best.shape[2]
    is_child = (tree.parents[:, None, 1:] == torch.arange(count, device=tokens.device)[:, None]) & (
        tree.tokens[:, None, 1:] >= 0
    )
    known = ((tree.tokens[:, None, None, 1:] == tokens[..., None]) & is_child[:, :, None]).any(3)
    own_paths = torch.where(known, -torch.inf, paths[:, :, None] + best).flatten(1)
    own_parents = (torch.arange(count, device=tokens.device) - 1).repeat_interleave(each)
    candidates = torch.cat([paths[:, 1:], own_paths], 1)
    depths = torch.cat([tree.depths[:, 1:], (tree.depths + 1).repeat_interleave(each, 1)], 1)
    return from_nodes(
        tree.tokens[:, 0],
        torch.cat([tree.tokens[:, 1:], tokens.flatten(1)], 1),
        torch.cat([tree.parents[:, 1:] - 1, own_parents.expand(len(tokens), -1)], 1),
        depths,
        candidates.masked_fill(depths > depth, -torch.inf),
        size,
    )
