"""The published tree: the top k symbols of each frame, a fixed tree over the frames, each alignment collapsed.

Alignments are collapsed before the trie is built. So alignments of the same text are one path, and a node's depth is
its position in the text. The tree is there to be compared with the exact trie, at equal numbers of nodes.
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
    """Return trees from a fixed set of alignments.

    The probability of a prefix is that of the alignment up to the frame that completes it. If several alignments
    collapse to the same prefix, it is the largest of theirs.

    Args:
        log_probs: `[B, T, V + 1]`, blank last; without a blank `[B, T, V]`.
        pending: `[B]` tokens of the roots.
        depth: Longest path.
        size: Nodes of each tree, root included.
        blank: Whether there is a blank and alignments are collapsed. If not, frame `u` emits token `u`, as Medusa's
            heads do.
        top_k: Number of symbols that each frame offers.
        alignments: Number of paths of the fixed tree over the frames.
    """
    batch, frames, symbols = log_probs.shape
    best, names = log_probs.float().topk(min(top_k, symbols), dim=2)
    ranks = _rank_tensor(frames, best.shape[2], alignments, log_probs.device)
    index = ranks[None, :, :, None].expand(batch, -1, -1, -1)
    symbol = names[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0]
    prefix = best[:, None].expand(-1, len(ranks), -1, -1).gather(3, index)[..., 0].cumsum(2)
    if blank:
        return from_paths(pending, *collapse(symbol, prefix, symbols - 1, depth), size)
    return from_paths(pending, symbol[..., :depth], prefix[..., :depth], size)


def collapse(alignments: Tensor, log_probs: Tensor, blank: int, depth: int) -> tuple[Tensor, Tensor]:
    """Remove repeats, then blanks, and close the gaps.

    Args:
        alignments: `[..., T]` symbols.
        log_probs: `[..., T]` log-probability of each alignment up to each frame.
        blank: The blank symbol.
        depth: Largest number of tokens of a path; later tokens are dropped.

    Returns:
        Paths `[..., depth]`, `PAD_TOKEN` past their ends; and the log-probability of each prefix `[..., depth]`, which
        is that of the alignment up to the frame that completes it, -inf past the end.
    """
    before = torch.cat([torch.full_like(alignments[..., :1], blank), alignments[..., :-1]], -1)
    emitted = (alignments != blank) & (alignments != before)
    # Symbols that are removed, and tokens that are too deep, go to a last column that is cut off.
    place = torch.where(emitted, emitted.cumsum(-1) - 1, depth).clamp_max(depth)
    shape = (*alignments.shape[:-1], depth + 1)
    paths = alignments.new_full(shape, PAD_TOKEN).scatter(-1, place, alignments)
    prefix_probs = log_probs.new_full(shape, -torch.inf).scatter(-1, place, log_probs)
    return paths[..., :depth], prefix_probs[..., :depth]


@functools.cache
def rank_paths(frames: int, top_k: int, count: int) -> list[list[int]]:
    """Return the fixed tree: up to `count` rank vectors `[T]`, by rising sum of ranks, early deviations first."""
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
    """Return the rank vectors `[count, T]`. They are sent to the device once, because sending them waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(rank_paths(frames, top_k, count), device=device)
