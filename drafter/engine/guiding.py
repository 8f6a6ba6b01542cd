"""Draft trees under guides: what may not follow is cut, what must follow is drafted, and each node gets its mask.

A guide walks its row's tree depth first, and returns to where it was. Nothing is put into an output but by the
verifier, so the tokens are those of plain decoding under the same guide.

A forced token is drafted whatever the budget says: it adds one position to a forward, and on average a row's token
costs no less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter.acceptance.contract import Verified
from drafter.acceptance.guide import Guide
from drafter.devices import send
from drafter.tree.token_tree import PAD_TOKEN, TokenTree

_PADDING = (PAD_TOKEN, 0, 1, float("-inf"))
_EVERYTHING = -1  # a word of a mask with all its bits


@dataclass(frozen=True)
class _Nodes:
    """A row's tree on the host, without padding: entry 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]

    def children(self) -> dict[int, list[int]]:
        found = defaultdict(list)
        for node in range(1, len(self.tokens)):
            found[self.parents[node]].append(node)
        return found

    def leading(self, size: int) -> _Nodes:
        return _Nodes(*(part[:size] for part in vars(self).values()))


def guided(
    tree: TokenTree, guides: Sequence[Guide | None], most: int, size: int, depth: int
) -> tuple[TokenTree, list[int]]:
    """Return the trees that the guides allow, and the forced tokens at the start of each, which come first.

    Args:
        tree: `[B, N]`; rows without a guide stay as they are, up to `most` draft tokens.
        most: Draft tokens of a row beside those that are forced at its start.
        size: Draft tokens of a row at most, and `depth` the deepest.
    """
    rows, forced = [], []
    parts_of_rows = (part.tolist() for part in vars(tree).values())
    for tokens, parents, depths, log_probs, guide in zip(*parts_of_rows, guides, strict=True):
        real = sum(token != PAD_TOKEN for token in tokens)
        nodes = _Nodes(tokens, parents, depths, log_probs).leading(real)
        begun = 0
        if guide is not None:
            nodes, begun = _allowed(nodes, guide, depth)
        rows.append(nodes.leading(1 + min(begun + most, size)))
        forced.append(min(begun, size))
    width = max(len(nodes.tokens) for nodes in rows)
    parts = []
    for like, name, padding in zip(vars(tree).values(), vars(tree), _PADDING, strict=True):
        values = [[*getattr(nodes, name), *[padding] * (width - len(nodes.tokens))] for nodes in rows]
        parts.append(send(torch.tensor(values, dtype=like.dtype), like.device))
    return TokenTree(*parts), forced


def _allowed(drafted: _Nodes, guide: Guide, depth: int) -> tuple[_Nodes, int]:
    """Return what a guide leaves of a row's tree, with what it forces, and the length of the forced run at the root."""
    children, found = drafted.children(), _Nodes(drafted.tokens[:1], [0], [0], drafted.log_probs[:1])
    begun = 0

    def visit(place: int, node: int | None) -> None:
        """Add what may follow node `place` of `found`, which is `node` of the draft; None if nobody drafted it."""
        nonlocal begun
        level = found.depths[place] + 1
        if level > depth:
            return
        below = {} if node is None else {drafted.tokens[child]: child for child in children[node]}
        candidates: dict[int, tuple[int | None, float]]
        candidates = {token: (child, drafted.log_probs[child]) for token, child in below.items()}
        if run := guide.forced():
            candidates = {run[0]: (below.get(run[0]), found.log_probs[place])}
            begun += begun == level - 1 == place  # a chain so far
        for token, (child, log_prob) in candidates.items():
            if guide.consume(token):
                for part, value in zip(vars(found).values(), (token, place, level, log_prob), strict=True):
                    part.append(value)
                visit(len(found.tokens) - 1, child)
                guide.rewind(1)

    visit(0, 0)
    # Stable, so that parents stay before their children, which are not more probable.
    order = sorted(range(len(found.tokens)), key=lambda one: -found.log_probs[one])
    rank = {one: place for place, one in enumerate(order)}
    parents = [rank[found.parents[one]] for one in order]
    kept = _Nodes(*([part[one] for one in order] for part in vars(found).values()))
    return _Nodes(kept.tokens, parents, kept.depths, kept.log_probs), begun


def masks(tree: TokenTree, guides: Sequence[Guide | None], vocabulary: int) -> Tensor:
    """Return the tokens that may follow each node, `[B, N, ceil(V / 32)]` int32, on the tree's device.

    Bit `v % 32` of word `v // 32` stands for token `v`. Rows without a guide have all bits.
    """
    rows, size = tree.tokens.shape
    words = (vocabulary + 31) // 32
    found = torch.full((rows, size, words), _EVERYTHING, dtype=torch.int32)
    all_tokens, all_parents = tree.tokens.tolist(), tree.parents.tolist()
    for row, guide in enumerate(guides):
        if guide is None:
            continue
        real = sum(token != PAD_TOKEN for token in all_tokens[row])
        nodes = _Nodes(all_tokens[row][:real], all_parents[row][:real], [], [])
        _fill(found[row], nodes, guide)
    return send(found, tree.tokens.device)


def _fill(found: Tensor, nodes: _Nodes, guide: Guide) -> None:
    children = nodes.children()

    def visit(node: int) -> None:
        guide.fill(found[node])
        for child in children[node]:
            if guide.consume(nodes.tokens[child]):
                visit(child)
                guide.rewind(1)

    visit(0)


def under_guides(guides: Sequence[Guide | None], verified: Verified) -> Verified:
    """Add what the guides of the rows let follow each node, if there are any."""
    if not any(guides):
        return verified
    return replace(verified, allowed=masks(verified.tree, guides, verified.logits.shape[-1]))
