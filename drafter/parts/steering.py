"""Draft trees of rows that are steered: what may not come is cut, what must is drafted, and each node gets its mask.

Nothing is put into an output but by the verifier, so the tokens are those of plain decoding under the same masks.

A forced token is drafted whatever the budget says: it adds one position to a forward, and on average a row's token
costs no less than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.guide import PutOff
from drafter.drafters.contract import Ask, DraftSpec
from drafter.parts.contract import Steering
from drafter.tree.paths import RowDrafts
from drafter.tree.token_tree import TokenTree, from_rows, root_only

_EVERYTHING = -1  # a word of a mask with all its bits


def _rows(tree: TokenTree) -> Iterator[RowDrafts]:
    """Yield the draft tokens of each row of a tree on the host, without root and padding."""
    for tokens, parents, depths, log_probs in zip(*(part.tolist() for part in vars(tree).values()), strict=True):
        real = slice(1, sum(token >= 0 for token in tokens))
        yield RowDrafts(tokens[real], [parent - 1 for parent in parents[real]], depths[real], log_probs[real])


def steered(
    tree: TokenTree,
    steering: Sequence[Steering | None],
    most: int,
    size: int,
    depth: int,
    brought: Sequence[RowDrafts | None] | None = None,
) -> tuple[TokenTree, list[int]]:
    """Return the trees of what may come, and the number of forced tokens at the start of each, which come first.

    Args:
        tree: `[B, N]`, on the host; rows without steering stay as they are, up to `most` draft tokens.
        most: Draft tokens of a row beside those that are forced at its start.
        size: Draft tokens of a row at most, and `depth` the deepest.
        brought: `[B]` what rows have from elsewhere in place of their trees, all of it.
    """
    rows, forced, sizes = [], [], []
    brought = brought or [None] * len(steering)
    for own, other, part in zip(_rows(tree), brought, steering, strict=True):
        drafts, rest, room = own, most, size
        if other is not None:
            drafts, rest = other, len(other.tokens)
            room = max(size, rest)
        drafts, begun = (drafts, 0) if part is None else part.before_step(drafts, depth)
        rows.append(drafts)
        forced.append(min(begun, room))
        sizes.append(1 + min(len(drafts.tokens), forced[-1] + rest, room))
    made = from_rows(tree.tokens[:, 0], rows, 1 + max(len(drafts.tokens) for drafts in rows))
    return made.trimmed(torch.tensor(sizes)), forced


def steered_drafts(
    tree: TokenTree, brought: Sequence[RowDrafts | None], steering: Sequence[Steering | None], ask: Ask, spec: DraftSpec
) -> tuple[TokenTree, list[int]] | None:
    """Return what `steered` does, of trees that a drafter was asked for; None where no row needs it.

    Rows of the trees beyond those of `steering` are padding, and left out.
    """
    size = ask.nodes if ask.fixed else spec.max_nodes
    if not (any(brought) or (size and any(steering))):
        return None
    return steered(on_host(tree, len(steering)), steering, ask.nodes, size, spec.max_depth, brought)


def on_host(tree: TokenTree, rows: int) -> TokenTree:
    """Return the first rows of trees on the host, which waits once for a device."""
    tree = tree.first_rows(rows)
    if not devices.is_asynchronous(tree.tokens.device):
        return tree
    numbers = torch.stack([tree.tokens, tree.parents, tree.depths, tree.log_probs.double().view(torch.long)])
    tokens, parents, depths, log_probs = devices.wait_for(numbers)
    return TokenTree(tokens, parents, depths, log_probs.view(torch.double).float())


def masks(tree: TokenTree | None, steering: Sequence[Steering | None], vocabulary: int) -> Tensor | None:
    """Return the tokens that may follow each node, `[B, N, ceil(V / 32)]` int32 on the host; None if no row is steered.

    See `Steering.allow`. Rows without steering have all bits.

    Args:
        tree: Trees `[B, N]` on the host, since a GPU is busy with their forward and would have to be waited for; None
            if steered rows have no draft tokens.
    """
    if not any(steering):
        return None
    if tree is None:
        tree = root_only(torch.zeros(len(steering), dtype=torch.long))
    found = torch.full((*tree.tokens.shape, (vocabulary + 31) // 32), _EVERYTHING, dtype=torch.int32)
    later = PutOff()
    for of_row, drafts, part in zip(found, _rows(tree), steering, strict=True):
        if part is not None:
            part.allow(of_row, drafts, later)
    later.do()
    return found
