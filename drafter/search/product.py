"""The exact best trie of independent distributions, one a depth: heads that do not know each other's tokens.

A prefix is as probable as the product of its tokens. In a best trie of `N` nodes no token comes in at a depth before
the `N - 2` that are likelier there, so a level-synchronous beam over the likeliest tokens is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes


def best_product_trie(log_probs: Tensor, pending: Tensor, size: int) -> TokenTree:
    """The `size`-node trie of the most probable prefixes.

    Args:
        log_probs: `[B, U, V]` normalised, of the token at each depth.
        pending: `[B]` tokens of the roots.
        size: Nodes of each tree, root included.
    """
    beam = size - 1
    if beam < 1:
        return root_only(pending)
    batch, depth, vocabulary = log_probs.shape
    best, names = log_probs.float().topk(min(beam, vocabulary), dim=2)
    width = best.shape[2]
    price = best.new_zeros(batch, 1)
    tokens, parents, prices, depths, before = [], [], [], [], -1
    for level in range(min(depth, beam)):
        scores = (price[:, :, None] + best[:, level, None]).flatten(1)
        kept, index = scores.topk(min(beam - level, scores.shape[1]))
        tokens.append(names[:, level].gather(1, index % width))
        parents.append(index // width + before)
        prices.append(kept)
        depths.append(torch.full_like(index, level + 1))
        before = 0 if level == 0 else before + price.shape[1]
        price = kept
    return from_nodes(
        pending, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(prices, 1), size
    )
