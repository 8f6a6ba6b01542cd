from __future__ import annotations

import torch

from drafter.tree.token_tree import PAD_TOKEN, TokenTree, bare_trees, root_only
from tests.support.trees import FORK


def test_ancestors_of_a_fork() -> None:
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    assert torch.equal(FORK.ancestors()[0], expected)
    assert torch.equal(FORK.ancestors(depth=2)[0], expected)


def test_ancestors_of_a_chain_reach_the_root() -> None:
    parents = torch.tensor([[0, 0, 1, 2, 3, 4, 5]])
    chain = TokenTree(parents, parents, torch.arange(7)[None], -torch.arange(7.0)[None])
    assert torch.equal(chain.ancestors(depth=6)[0], torch.ones(7, 7).tril().bool())


def test_paths_spell_out_each_node() -> None:
    assert FORK.paths(2).tolist() == [[[PAD_TOKEN, PAD_TOKEN], [3, PAD_TOKEN], [5, PAD_TOKEN], [5, 4]]]


def test_the_first_child_comes_first() -> None:
    two = TokenTree(*(part.expand(2, -1) for part in vars(FORK).values()))
    assert two.trimmed(torch.tensor([4, 2])).first_children().tolist() == [[1, 4, 3, 4], [1, 4, 4, 4]]


def test_bare_trees_repeat_the_root() -> None:
    trees = bare_trees(torch.tensor([7, 8]), 3)
    assert trees.tokens.tolist() == [[7] * 3, [8] * 3]
    assert trees.parents.tolist() == trees.depths.tolist() == [[0] * 3] * 2
    assert trees.log_probs.tolist() == [[0.0] * 3] * 2


def test_root_only_is_plain_decoding() -> None:
    tree = root_only(torch.tensor([7, 8]))
    assert tree.tokens.tolist() == [[7], [8]]
    assert tree.size == 1
