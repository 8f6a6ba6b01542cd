"""What lenient verifiers ask the base about every node of a tree: its choice, its certainty, its price of the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.verifiers.choices import NodeChoices, RowSampling
from drafter.verifiers.contract import Verified


@dataclass(frozen=True)
class NodeViews:
    """The base's view of the nodes of B trees.

    Args:
        choices: `[B, N]` the base's choice after each node.
        log_probs: `[B, N]` its log-probability of each node's token at the node's parent; 0 for the root.
        entropy: `[B, N]` its uncertainty after each node, in nats.
    """

    choices: Tensor
    log_probs: Tensor
    entropy: Tensor


def node_views(verified: Verified, sampling: RowSampling, entropy: Callable[[Tensor], Tensor]) -> NodeViews:
    """Look at the nodes one after another: all of them at once would be `[B, N, V]` in fp64.

    Args:
        verified: The trees and the base's logits.
        sampling: How the rows choose tokens.
        entropy: Of log-probabilities `[B, V]`, `[B]`.
    """
    tree = verified.tree
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    asked = NodeChoices(verified.logits, tree, verified.ancestors, sampling)
    prices = torch.zeros(tree.tokens.shape, dtype=torch.float64, device=rows.device)
    choices, certainties = [], []
    for node in range(tree.size):
        choice, log_probs = asked.with_log_probs(rows, torch.full_like(rows, node))
        choices.append(choice)
        certainties.append(entropy(log_probs))
        prices = torch.where(tree.parents == node, log_probs.gather(1, tree.tokens.clamp_min(0)), prices)
    prices[:, 0].fill_(0)
    return NodeViews(torch.stack(choices, 1), prices, torch.stack(certainties, 1))


def shannon_entropy(log_probs: Tensor) -> Tensor:
    """Return `−Σ p log p` `[R]` in nats of log-probabilities `[R, V]`, of which some may be -inf."""
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def leading_entropy(log_probs: Tensor, count: int = 3) -> Tensor:
    """Return `−Σ p log p` `[R]` over the `count` most probable tokens of `[R, V]`, whose `p` are not scaled up."""
    return shannon_entropy(log_probs.topk(min(count, log_probs.shape[-1]), dim=-1).values)
