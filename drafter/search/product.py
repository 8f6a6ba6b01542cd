"""The exact best trie under independent distributions, one for each depth.

The probability of a prefix is the product of its tokens' probabilities. Where a token is in the best trie, all likelier
tokens of its depth are its siblings there. So the best trie of `N` nodes holds only the `N - 1` likeliest tokens of a
depth, and a level-synchronous beam over them is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes, from_paths


def best_product_trie(log_probs: Tensor, pending: Tensor, size: int) -> TokenTree:
    """Find the `size`-node trie of the most probable prefixes.

    Args:
        log_probs: `[B, U, V]` normalised log-probabilities of the token at each depth.
        pending: `[B]` tokens of the roots.
        size: Nodes of each tree, root included.
    """
    beam = size - 1
    if beam < 1:
        return root_only(pending)
    batch, depth, vocabulary = log_probs.shape
    best, names = log_probs.float().topk(min(beam, vocabulary), dim=2)
    width = best.shape[2]
    parent_probs = best.new_zeros(batch, 1)
    tokens, parents, depths, levels, before = [], [], [], [], -1
    for level in range(min(depth, beam)):
        scores = (parent_probs[:, :, None] + best[:, level, None]).flatten(1)
        kept, index = scores.topk(min(beam - level, scores.shape[1]))
        tokens.append(names[:, level].gather(1, index % width))
        parents.append(index // width + before)
        depths.append(torch.full_like(index, level + 1))
        levels.append(kept)
        before = 0 if level == 0 else before + parent_probs.shape[1]
        parent_probs = kept
    return from_nodes(
        pending, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(levels, 1), size
    )


def likeliest_chain(log_probs: Tensor, pending: Tensor, size: int) -> TokenTree:
    """Return the chain of each depth's likeliest token.

    Args:
        log_probs: `[B, U, V]` normalised log-probabilities of the token at each depth.
        pending: `[B]` tokens of the roots.
        size: Nodes of each chain, root included; a chain longer than U is padded.
    """
    best, names = log_probs[:, : size - 1].float().max(2)
    return from_paths(pending, names[:, None], best.cumsum(1)[:, None], size)
