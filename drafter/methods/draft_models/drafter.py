"""`model:A`: draft trees from a smaller model with the target's tokeniser (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.methods.draft_models.text_reader import RunNodes, TextReader
from drafter.target.model import BaseModel
from drafter.tree.token_tree import Frontier, TokenTree, best_first_trie, most_places

_DEPTH = 8
"""Deepest level of a tree; each costs a forward of the draft model."""
_WIDTH = 16
"""Nodes run per level. Trees with more draft nodes may not be optimal."""


class ModelDrafter(Drafter):
    """Best-first tree of a draft model's likeliest continuations, one forward per level.

    Only nodes among the best `nodes` so far are run: a path's probability falls along it, so no other can have a child
    in the tree.

    Args:
        model: The draft model, with the target model's tokeniser, on any device.
        base: The target model.
        nodes: Draft nodes of the largest tree; ignored with an `expansion`.
        expansion: Children per node, level by level, for trees of a fixed shape; SpecInfer's is 1, 1, 3, 1, 1, 1, 1, 1.

    Raises:
        ValueError: The `expansion` is empty, or has a number below 1.
    """

    def __init__(self, model: BaseModel, base: BaseModel, nodes: int, expansion: Sequence[int] | None = None) -> None:
        self._expansion = None if expansion is None else tuple(expansion)
        if self._expansion is not None:
            if min(self._expansion, default=0) < 1:
                raise ValueError(f"expansion must be at least one number, none below 1, not {self._expansion}")
            nodes = sum(accumulate(self._expansion, int.__mul__))
        depth = min(nodes, _DEPTH) if self._expansion is None else len(self._expansion)
        self._reader, self._device = TextReader(model, base, depth + 1), model.device
        self._beam = min(nodes, _WIDTH) if self._expansion is None else nodes
        beside = model.device == base.device
        kept = sum(model.kv_bytes_per_token) if beside else 0
        self.spec = DraftSpec(nodes, depth, graph_safe=beside, bytes_per_token=kept)

    def open(self, loan: Loan) -> None:
        self._times = loan.times
        if self._expansion is None:
            run = most_places(self.spec.max_depth, self._beam) - 1
        else:
            run = sum(accumulate(self._expansion[:-1], int.__mul__))
        self._reader.open(loan.slots, loan.length, run)

    def enter(self, slot: int, text: Ids) -> None:
        self._reader.enter(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        self._reader.copy(source, target, length)

    def move(self, source: int, target: int) -> None:
        self._reader.move(source, target)

    def clear(self, slot: int) -> None:
        self._reader.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        self._reader.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Grow trees `[B, 1 + ask.nodes]`."""
        growth = _Growth(self._reader, context, self._expansion, ask.nodes)
        size = 1 + (ask.nodes if self._expansion is None else self.spec.max_nodes)
        least = ask.least_probability if self._expansion is None else 0.0
        pending = context.pending.to(self._device)
        tree = best_first_trie(growth, pending, self.spec.max_depth, size, self._beam, least)
        self._times.mark("draft")
        device = context.tokens.device
        return TokenTree(*(part.to(device) for part in vars(tree.leading(1 + ask.nodes)).values()))


class _Growth:
    """Conditionals of one step's trees; see `search.Conditionals`. `children` counts without an expansion."""

    def __init__(
        self, reader: TextReader, context: DraftContext, expansion: tuple[int, ...] | None, children: int
    ) -> None:
        self._reader, self._context = reader, context
        self._left, self._children = iter(expansion or ()), children

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        if not frontier.first:  # `read` takes the pending token with the new ones
            log_probs = self._reader.read(self._context)
        else:
            log_probs = self._reader.extend(self._context, RunNodes.of(frontier), frontier.real)
        best, tokens = log_probs.topk(min(next(self._left, self._children), log_probs.shape[2]))
        return best, tokens
