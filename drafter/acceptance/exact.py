"""Lossless verifier: follows the target model's own choices down the draft tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.choices import NodeChoices, RowSampling
from drafter.acceptance.contract import Accepted, Verified, Verifier
from drafter.tree.token_tree import TokenTree


def likeliest(logits: Tensor) -> Tensor:
    """Return the argmax of logits `[B, N, V]`, `[B, N]` int64; the lowest token on a tie."""
    if _reads_on_host(logits):
        # NumPy runs on this thread, in a fraction of the time that it takes to wake PyTorch's other threads.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def are_sound(logits: Tensor) -> Tensor:
    """Return whether a row's logits `[B, N, V]` have neither NaN nor +inf, `[B]`."""
    if _reads_on_host(logits):
        # The maximum is NaN if any value is.
        return torch.from_numpy(logits.numpy().max((1, 2))).isfinite()
    return logits.amax((1, 2)).isfinite()


def _reads_on_host(logits: Tensor) -> bool:
    return not devices.is_asynchronous(logits.device) and logits.dtype in (torch.float32, torch.float64)


class ExactVerifier(Verifier):
    """Accepts a draft token if and only if the target model chooses it there."""

    name = "exact"
    lossless = True

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        tree, ancestors = verified.tree, verified.ancestors
        if sampling.mode.likeliest:
            return walk(tree, likeliest(verified.logits), ancestors, verified.depth)
        return descend(tree, NodeChoices(verified.logits, tree, ancestors, sampling).at, verified.depth)


def walk(tree: TokenTree, choices: Tensor, ancestors: Tensor, depth: int) -> Accepted:
    """Descend from the root while a child carries the token that the target model chose.

    Root 7 with children 3 and 5, and 4 below 5; the target model chooses 5 at the root, 4 at node 5, 9 at node 4::

        tokens  [7, 3, 5, 4]   parents [0, 0, 0, 2]   choices [5, 1, 4, 9]
        path    [0, 2, 3]      tokens  [5, 4, 9]      count 2

    Args:
        choices: `[B, N]` the target model's choice after each node, by node id.
    """
    if tree.size == 1:
        return Accepted(tree.parents, choices, torch.zeros_like(choices[:, 0]))
    carries = tree.tokens == choices.gather(1, tree.parents)
    carries[:, 0].fill_(True)
    accepted = (carries[:, None, :] | ~ancestors).all(dim=2)
    depths = torch.where(accepted, tree.depths, 0)
    nodes = torch.arange(tree.size, device=choices.device).expand_as(depths)
    path = depths.new_zeros(depths.shape[0], depth + 1).scatter_reduce(
        1, depths, torch.where(accepted, nodes, 0), reduce="amax"
    )
    return Accepted(path, choices.gather(1, path), depths.amax(dim=1))


def descend(tree: TokenTree, choose: Callable[[Tensor, Tensor], Tensor], depth: int) -> Accepted:
    """Return what `walk` returns, but choose only at the nodes on the path, for expensive choices.

    `choose` returns the target model's choices `[R]` for (rows `[R]`, nodes `[R]`).
    """
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    ids = torch.arange(tree.size, device=rows.device)
    node, count = torch.zeros_like(rows), torch.zeros_like(rows)
    path, tokens = (rows.new_zeros(len(rows), depth + 1) for _ in range(2))
    for level in range(depth + 1):
        token = choose(rows, node)
        tokens[rows, level] = token
        if level == depth:
            break
        child = (tree.parents[rows] == node[:, None]) & (tree.tokens[rows] == token[:, None])
        child &= (ids > 0) & (count[rows] == level)[:, None]
        found, node = child.any(1), torch.where(child, ids, 0).amax(1)
        # A GPU would have to synchronise to drop ended rows; there they go on, and nothing reads the results.
        if not devices.is_asynchronous(rows.device):
            rows, node, found = rows[found], node[found], found[found]
            if not len(rows):
                break
        path[rows, level + 1] = node
        count[rows] += found
    return Accepted(path, tokens, count)
