"""Lenient verification: the target model's uncertainty at every node, and a walk that may accept other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, Verified
from drafter.tree.token_tree import TokenTree, followed


@dataclass(frozen=True)
class NodeViews:
    """The target model's outputs at the nodes of B trees, `[B, N]` each."""

    choices: Tensor  # choice after each node
    log_probs: Tensor  # log-probability of each node's token at its parent; 0 for the root
    entropy: Tensor  # uncertainty after each node, in nats


def node_views(
    verified: Verified, sampling: RowSampling, entropy: Callable[[Tensor], Tensor], *, own: bool = False
) -> NodeViews:
    """Compute the views. `entropy` maps log-probabilities `[B, V]` to `[B]`.

    With `own`, they are of the model's own distribution, whatever the row samples from.
    """
    tree = verified.tree
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    asked = verified.choices(sampling)
    prices = torch.zeros(tree.tokens.shape, dtype=torch.float64, device=rows.device)
    choices, certainties = [], []
    # One node after another: all at once would be `[B, N, V]` in fp64.
    for node in range(tree.size):
        at = torch.full_like(rows, node)
        choice, log_probs = asked.own(rows, at) if own else asked.with_log_probs(rows, at)
        choices.append(choice)
        certainties.append(entropy(log_probs))
        prices = torch.where(tree.parents == node, log_probs.gather(1, tree.tokens.clamp_min(0)), prices)
    prices[:, 0].fill_(0)
    return NodeViews(torch.stack(choices, 1), prices, torch.stack(certainties, 1))


def shannon_entropy(log_probs: Tensor) -> Tensor:
    """Return `−Σ p log p` `[R]` in nats of log-probabilities `[R, V]`, some of which may be -inf."""
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def lenient_walk(tree: TokenTree, choices: Tensor, lenient: Tensor, log_probs: Tensor, depth: int) -> Accepted:
    """Descend from the root, at each node to the exact child if there is one, otherwise to where the walk goes deepest.

    Root 7 with children 3 and 5, and 4 below 3; the target model chooses 6 at the root and 4 at node 1. Both children
    of the root are lenient, and the walk goes deepest by the first::

        tokens  [7, 3, 5, 4]   parents [0, 0, 0, 1]   choices [6, 4, 1, 9]
        path    [0, 1, 3]      tokens  [3, 4, 9]      count 2   lenient [True, False, False]

    Args:
        choices: `[B, N]` the target model's choice after each node, by node id.
        lenient: `[B, N]` bool: nodes that may be accepted whatever was chosen at their parent.
        log_probs: `[B, N]` log-probability of each node's token at its parent; the root's is not read.
    """
    batch, nodes = tree.tokens.shape
    ids = torch.arange(nodes, device=choices.device).expand(batch, nodes)
    is_draft = (ids > 0) & (tree.tokens >= 0)
    exact = is_draft & (tree.tokens == choices.gather(1, tree.parents))
    allowed = exact | (is_draft & lenient)
    # A child's worth is the length of the walk from it on; an exact child is worth more than any length.
    bonus, worth, best = depth + 1, torch.zeros_like(ids), torch.zeros_like(ids)
    for level in range(depth, 0, -1):
        here = allowed & (tree.depths == level)
        worth = torch.where(here, exact * bonus + 1 + best % bonus, worth)
        best = best.scatter_reduce(1, tree.parents, torch.where(here, worth, 0), "amax")
    following = _child(tree.parents, allowed & (worth == best.gather(1, tree.parents)), log_probs, ids)
    path = followed(following, depth)
    path = torch.where(path < nodes, path, 0)
    after = torch.cat([path[:, 1:], path.new_zeros(batch, 1)], 1)
    drafted = after > 0
    tokens = torch.where(drafted, tree.tokens.gather(1, after), choices.gather(1, path))
    return Accepted(path, tokens, drafted.sum(1), drafted & ~exact.gather(1, after))


def _child(parents: Tensor, candidates: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return each node's most probable candidate child, `[B, N]` node ids; N for none."""
    nodes = ids.shape[1]
    # Clamp, so that a candidate of log-probability -inf differs from no candidate.
    price = torch.where(candidates, log_probs.clamp_min(torch.finfo(log_probs.dtype).min), -torch.inf)
    most = torch.full_like(price, -torch.inf).scatter_reduce(1, parents, price, "amax")
    chosen = candidates & (price == most.gather(1, parents))
    return torch.full_like(ids, nodes).scatter_reduce(1, parents, torch.where(chosen, ids, nodes), "amin")
