"""The published tree: top-k per frame, a fixed tree over the frames, each alignment collapsed.

Collapse comes first and the trie after, so that alignments of the same text are one path, and depth is the position
in the text. Kept for comparison with the exact trie, at equal numbers of nodes.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from drafter.tree.token_tree import PAD_TOKEN, TokenTree
from drafter.tree.trie import from_paths


def static_tree(
    log_probs: Tensor,
    pending: Tensor,
    depth: int,
    size: int,
    *,
    blank: bool = True,
    top_k: int = 4,
    alignments: int = 64,
) -> TokenTree:
    """Trees from a fixed set of alignments.

    A prefix is priced by the alignment up to the frame that completes it, the best one where several collapse to it.

    Args:
        log_probs: `[B, T, V + 1]`, blank last; without a blank `[B, T, V]`.
        pending: `[B]` tokens of the roots.
        depth: Longest path.
        size: Nodes of each tree, root included.
        blank: Whether alignments are collapsed; without, frame `u` says token `u`, as Medusa's heads do.
        top_k: Symbols a frame offers.
        alignments: Paths of the fixed tree over the frames.
    """
    batch, frames, symbols = log_probs.shape
    best, names = log_probs.float().topk(min(top_k, symbols), dim=2)
    ranks = _rank_tensor(frames, best.shape[2], alignments, log_probs.device)
    index = ranks[None, :, :, None].expand(batch, -1, -1, -1)
    symbol = names[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0]
    price = best[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0].cumsum(2)
    paths, prices = collapse(symbol, price, symbols - 1, depth) if blank else (symbol[..., :depth], price[..., :depth])
    return from_paths(pending, paths, prices, size)


def collapse(alignments: Tensor, log_probs: Tensor, blank: int, depth: int) -> tuple[Tensor, Tensor]:
    """Remove repeats, then blanks, and close the gaps.

    Args:
        alignments: `[..., T]` symbols.
        log_probs: `[..., T]` of each alignment up to each frame.
        blank: The symbol that says nothing.
        depth: Tokens of a path; later ones are dropped.

    Returns:
        Paths `[..., depth]`, `PAD_TOKEN` past their ends, and the price of each prefix: that of the frame completing
        it; -inf past the end.
    """
    before = torch.cat([torch.full_like(alignments[..., :1], blank), alignments[..., :-1]], -1)
    said = (alignments != blank) & (alignments != before)
    # What is not said, or too deep, goes to a column that is cut off.
    slot = torch.where(said, said.cumsum(-1) - 1, depth).clamp_max(depth)
    shape = (*alignments.shape[:-1], depth + 1)
    paths = alignments.new_full(shape, PAD_TOKEN).scatter(-1, slot, alignments)
    prices = log_probs.new_full(shape, -torch.inf).scatter(-1, slot, log_probs)
    return paths[..., :depth], prices[..., :depth]


@functools.cache
def rank_paths(frames: int, top_k: int, count: int) -> list[list[int]]:
    """The fixed tree: up to `count` rank vectors `[T]`, by rising sum of ranks, early deviations first."""
    paths: list[list[int]] = []
    for total in range(frames * (top_k - 1) + 1):
        for frames_raised in itertools.combinations_with_replacement(range(frames), total):
            ranks = [frames_raised.count(frame) for frame in range(frames)]
            if max(ranks) < top_k:
                paths.append(ranks)
                if len(paths) == count:
                    return paths
    return paths


@functools.cache
def _rank_tensor(frames: int, top_k: int, count: int, device: torch.device) -> Tensor:
    """`[count, T]` the rank vectors, sent to the device once: to send them is to wait for it."""
    with torch.inference_mode(False):
        return torch.tensor(rank_paths(frames, top_k, count), device=device)
