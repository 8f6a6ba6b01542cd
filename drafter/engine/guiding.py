"""Draft trees under guides: what may not follow is cut, what must follow is drafted, and each node gets its mask.

A guide walks its row's tree depth first, and returns to where it was. Nothing is put into an output but by the
verifier, so the tokens are those of plain decoding under the same guide.

A forced token is drafted whatever the budget says: it adds one position to a forward, and on average a row's token
costs no less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter.acceptance.contract import Verified
from drafter.acceptance.guide import Guide
from drafter.devices import send
from drafter.drafters.contract import Ask, DraftSpec
from drafter.tree.token_tree import TokenTree, from_nodes, root_only

_ROOT = -1
_EVERYTHING = -1  # a word of a mask with all its bits


@dataclass(frozen=True)
class _Drafts:
    """A row's draft tokens as `from_nodes` takes them: parents before children, and `_ROOT` for the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]

    def children(self) -> dict[int, list[int]]:
        found = defaultdict(list)
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return found


def _rows(tree: TokenTree) -> Iterator[_Drafts]:
    """Yield the draft tokens of each row of a tree on the host, without root and padding."""
    for tokens, parents, depths, log_probs in zip(*(part.tolist() for part in vars(tree).values()), strict=True):
        real = slice(1, sum(token >= 0 for token in tokens))
        yield _Drafts(tokens[real], [parent - 1 for parent in parents[real]], depths[real], log_probs[real])


def guided(
    tree: TokenTree, guides: Sequence[Guide | None], most: int, size: int, depth: int
) -> tuple[TokenTree, list[int]]:
    """Return the trees that the guides allow, and the forced tokens at the start of each, which come first.

    Args:
        tree: `[B, N]`, on the host; rows without a guide stay as they are, up to `most` draft tokens.
        most: Draft tokens of a row beside those that are forced at its start.
        size: Draft tokens of a row at most, and `depth` the deepest.
    """
    rows, forced = [], []
    for drafts, guide in zip(_rows(tree), guides, strict=True):
        drafts, begun = (drafts, 0) if guide is None else _allowed(drafts, guide, depth)
        rows.append(drafts)
        forced.append(min(begun, size))
    width = max(len(drafts.tokens) for drafts in rows)
    tokens, parents, depths, log_probs = (  # one tensor of all rows: making many, as `pad_sequence` needs, takes longer
        torch.tensor([[*one, *[missing] * (width - len(one))] for one in values], dtype=like.dtype)
        for values, like, missing in zip(
            zip(*(vars(drafts).values() for drafts in rows), strict=True),
            vars(tree).values(),
            (0, _ROOT, 1, -torch.inf),
            strict=True,
        )
    )
    sizes = [1 + min(len(drafts.tokens), begun + most, size) for drafts, begun in zip(rows, forced, strict=True)]
    made = from_nodes(tree.tokens[:, 0], tokens, parents, depths, log_probs, 1 + width)
    return made.trimmed(torch.tensor(sizes)), forced


def drafts_under_guides(
    tree: TokenTree, guides: Sequence[Guide | None], ask: Ask, spec: DraftSpec
) -> tuple[TokenTree, list[int]] | None:
    """Return trees and forced tokens as `guided` does, of trees that a drafter was asked for; None without guides."""
    size = ask.most if ask.fixed else spec.largest
    if not size or not any(guides):
        return None
    on_host = TokenTree(*(part.cpu() for part in vars(tree).values()))
    return guided(on_host, guides, ask.most, size, spec.max_depth)


def _allowed(drafted: _Drafts, guide: Guide, depth: int) -> tuple[_Drafts, int]:
    """Return what a guide leaves of the drafts, with what it forces, and the length of the forced run at the start."""
    children, found, begun = drafted.children(), _Drafts([], [], [], []), 0

    def visit(place: int, node: int | None, level: int, log_prob: float) -> None:
        """Add what may follow `place` of `found`, at depth `level`; nobody drafted that place if `node` is None."""
        nonlocal begun
        if level > depth:
            return
        below = {} if node is None else {drafted.tokens[child]: child for child in children[node]}
        candidates: dict[int, tuple[int | None, float]]
        candidates = {token: (child, drafted.log_probs[child]) for token, child in below.items()}
        if run := guide.forced():
            candidates = {run[0]: (below.get(run[0]), log_prob)}
            begun += begun == level - 1 == place + 1  # a chain so far
        for token, (child, own) in candidates.items():
            if guide.consume(token):
                for part, value in zip(vars(found).values(), (token, place, level, own), strict=True):
                    part.append(value)
                visit(len(found.tokens) - 1, child, level + 1, own)
                guide.rewind(1)

    visit(_ROOT, _ROOT, 1, 0.0)
    return found, begun


def masks(tree: TokenTree, guides: Sequence[Guide | None], vocabulary: int) -> Tensor:
    """Return the tokens that may follow each node of a tree on the host, `[B, N, ceil(V / 32)]` int32, there.

    Bit `v % 32` of word `v // 32` stands for token `v`. Rows without a guide have all bits.
    """
    words = (vocabulary + 31) // 32
    found = torch.full((*tree.tokens.shape, words), _EVERYTHING, dtype=torch.int32)
    for of_row, drafts, guide in zip(found, _rows(tree), guides, strict=True):
        if guide is not None:
            _fill(of_row, drafts, guide)
    return found


def _fill(found: Tensor, drafts: _Drafts, guide: Guide) -> None:
    children = drafts.children()

    def visit(node: int) -> None:
        guide.fill(found[1 + node])
        for child in children[node]:
            if guide.consume(drafts.tokens[child]):
                visit(child)
                guide.rewind(1)

    visit(_ROOT)


def under_guides(guides: Sequence[Guide | None], tree: TokenTree | None, verified: Verified) -> Verified:
    """Add what the guides of the rows let follow each node, if there are any.

    Args:
        tree: The verified trees on the host, since a GPU is busy with their forward and would have to be waited for;
            None if rows with a guide have no draft tokens.
    """
    if not any(guides):
        return verified
    if tree is None:
        tree = root_only(torch.zeros(len(guides), dtype=torch.long)).padded(verified.tree.size)
    allowed = masks(tree, guides, verified.logits.shape[-1])
    return replace(verified, allowed=send(allowed, verified.tree.tokens.device))
