"""What a test may ask of any draft tree."""

from __future__ import annotations

import pytest
import torch

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
    """Prefix → price of a tree's real nodes below the root."""
    paths = tree.paths(depth)[row].tolist()
    prices = tree.log_probs[row].exp().tolist()
    return {
        tuple(token for token in path if token >= 0): price
        for path, price in zip(paths, prices, strict=True)
        if price > 0 and path[0] >= 0
    }


def check_slice_contract(tree: TokenTree) -> None:
    """Prices fall; a parent comes before its child, is one level up, and padding is last."""
    prices, parents, depths = tree.log_probs, tree.parents, tree.depths
    assert bool((prices[:, 1:] <= prices[:, :-1]).all())
    real = prices[:, 1:] > -torch.inf
    index = torch.arange(1, tree.size)
    assert bool((parents[:, 1:] < index)[real].all())
    assert bool((depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1)[real].all())
    assert bool((tree.tokens[:, 1:] >= 0)[real].all())
    assert bool((tree.tokens[:, 1:] == -1)[~real].all())
    assert bool((prices[:, 0] == 0).all())


def check_best(found: dict[Prefix, float], exact: dict[Prefix, float], size: int) -> None:
    """`found` holds the `size - 1` most probable prefixes, each at its probability (ties in any order)."""
    # What float32 cannot hold is left out.
    found = {prefix: price for prefix, price in found.items() if price > 1e-30}
    possible = [price for price in sorted(exact.values(), reverse=True)[: size - 1] if price > 1e-30]
    assert len(found) == len(possible)
    for prefix, price in found.items():
        assert price == pytest.approx(exact[prefix], rel=2e-4)
    assert sorted(found.values(), reverse=True) == pytest.approx(possible, rel=2e-4)


def check_same_trees(first: TokenTree, second: TokenTree, depth: int) -> None:
    """Equal up to rounding, which may swap nodes of nearly equal price, at the end even in and out of the tree."""
    assert torch.equal(first.tokens[:, 0], second.tokens[:, 0])
    for row in range(first.tokens.shape[0]):
        ours, theirs = nodes(first, row, depth), nodes(second, row, depth)
        least = max(min(ours.values()), min(theirs.values()))
        for prefix in ours.keys() | theirs.keys():
            assert ours.get(prefix, least) == pytest.approx(theirs.get(prefix, least), abs=1e-4)
