"""Checks of draft trees."""

from __future__ import annotations

import pytest
import torch

from drafter.target_model.tree_scan import TreePaths
from drafter.tree.token_tree import TokenTree

Prefix = tuple[int, ...]

FORK = TokenTree(
    tokens=torch.tensor([[7, 3, 5, 4]]),
    parents=torch.tensor([[0, 0, 0, 2]]),
    depths=torch.tensor([[0, 1, 1, 2]]),
    log_probs=torch.tensor([[0.0, -0.5, -1.0, -2.0]]),
)
"""Root 7; below it 3 and 5; 4 below 5."""


def nodes(tree: TokenTree, row: int, depth: int) -> dict[Prefix, float]:
    """Return the probability of each node of a row's tree, root and padding left out, by its prefix."""
    paths = tree.paths(depth)[row].tolist()
    probs = tree.log_probs[row].exp().tolist()
    return {
        tuple(token for token in path if token >= 0): prob
        for path, prob in zip(paths, probs, strict=True)
        if prob > 0 and path[0] >= 0
    }


def check_slice_contract(tree: TokenTree) -> None:
    """Check that probabilities fall, parents come before children and are one level up, and padding is last."""
    probs, parents, depths = tree.log_probs, tree.parents, tree.depths
    assert bool((probs[:, 1:] <= probs[:, :-1]).all())
    real = probs[:, 1:] > -torch.inf
    index = torch.arange(1, tree.size)
    assert bool((parents[:, 1:] < index)[real].all())
    assert bool((depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1)[real].all())
    assert bool((tree.tokens[:, 1:] >= 0)[real].all())
    assert bool((tree.tokens[:, 1:] == -1)[~real].all())
    assert bool((probs[:, 0] == 0).all())


def check_best(found: dict[Prefix, float], exact: dict[Prefix, float], size: int) -> None:
    """Check that `found` has the `size - 1` most probable prefixes with their probabilities, ties in any order."""
    # What float32 cannot hold is left out.
    found = {prefix: prob for prefix, prob in found.items() if prob > 1e-30}
    possible = [prob for prob in sorted(exact.values(), reverse=True)[: size - 1] if prob > 1e-30]
    assert len(found) == len(possible)
    # In float32 what is left beside a blank that is almost sure has few digits.
    for prefix, prob in found.items():
        assert prob == pytest.approx(exact[prefix], rel=2e-4, abs=1e-7)
    assert sorted(found.values(), reverse=True) == pytest.approx(possible, rel=2e-4, abs=1e-7)


def check_same_trees(first: TokenTree, second: TokenTree, depth: int) -> None:
    """Check that trees are equal but for nodes of nearly equal probability, which rounding may swap in or out."""
    assert torch.equal(first.tokens[:, 0], second.tokens[:, 0])
    for row in range(first.tokens.shape[0]):
        ours, theirs = nodes(first, row, depth), nodes(second, row, depth)
        least = max(min(ours.values()), min(theirs.values()))
        for prefix in ours.keys() | theirs.keys():
            assert ours.get(prefix, least) == pytest.approx(theirs.get(prefix, least), abs=1e-4)


def random_paths(rows: int, nodes: int, seed: int) -> TreePaths:
    """Trees of random shapes."""
    random = torch.Generator().manual_seed(seed)
    parents = torch.zeros(rows, nodes, dtype=torch.long)
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (rows,), generator=random)
        ancestors[:, node] |= ancestors[torch.arange(rows), parents[:, node]]
    return TreePaths(parents, ancestors)
