"""The lossless verdict on a draft tree: follow the base's own choices as far as the tree has them.

Nothing about the drafter's probabilities enters, so the emitted tokens are those of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Walk:
    """The way down each tree.

    Args:
        path: `[B, D + 1]` node ids from the root down; entries past `accepted` are 0.
        tokens: `[B, D + 1]` the base's choice at each node of the path: the accepted draft tokens and, at
            `accepted`, the bonus token. Entries past it are meaningless.
        accepted: `[B]` draft tokens accepted; `accepted + 1` tokens are emitted.
    """

    path: Tensor
    tokens: Tensor
    accepted: Tensor


def walk(tree: TokenTree, choices: Tensor, ancestors: Tensor, depth: int) -> Walk:
    """Descend from the root while a child carries the token that the base chose.

    Root 7 with children 3 and 5, and 4 below 5; the base chooses 5 at the root, 4 at node 5, 9 at node 4::

        tokens  [7, 3, 5, 4]   parents [0, 0, 0, 2]   choices [5, 1, 4, 9]
        path    [0, 2, 3]      tokens  [5, 4, 9]      accepted 2

    Args:
        tree: `[B, N]` nodes.
        choices: `[B, N]` the base's choice after each node, read by node id.
        ancestors: `[B, N, N]` of the tree.
        depth: No node lies deeper.
    """
    if tree.size == 1:
        return Walk(tree.parents, choices, torch.zeros_like(choices[:, 0]))
    carries = tree.tokens == choices.gather(1, tree.parents)
    carries[:, 0].fill_(True)
    accepted = (carries[:, None, :] | ~ancestors).all(dim=2)
    depths = torch.where(accepted, tree.depths, 0)
    nodes = torch.arange(tree.size, device=choices.device).expand_as(depths)
    path = depths.new_zeros(depths.shape[0], depth + 1).scatter_reduce(
        1, depths, torch.where(accepted, nodes, 0), reduce="amax"
    )
    return Walk(path, choices.gather(1, path), depths.amax(dim=1))
