from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.tree.token_tree import PAD_TOKEN, TokenTree
from drafter.verifiers.exact import walk


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    depths = [0]
    for i in range(1, len(parents)):
        depths.append(depths[parents[i]] + 1)
    row = torch.tensor([tokens])
    return TokenTree(row, torch.tensor([parents]), torch.tensor([depths]), -torch.tensor([depths]).float())


def test_walk_follows_the_base() -> None:
    tree = tree_of([7, 3, 5, 4], [0, 0, 0, 2])
    step = walk(tree, torch.tensor([[5, 1, 4, 9]]), tree.ancestors(), depth=2)
    assert step.path.tolist() == [[0, 2, 3]]
    assert step.tokens.tolist() == [[5, 4, 9]]
    assert step.count.tolist() == [2]


def test_walk_stops_where_no_child_carries_the_choice() -> None:
    tree = tree_of([7, 3, 5, 4], [0, 0, 0, 2])
    step = walk(tree, torch.tensor([[6, 1, 4, 9]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [0]
    assert step.tokens[0, 0].item() == 6


def test_a_right_token_below_a_wrong_parent_is_not_accepted() -> None:
    tree = tree_of([7, 3, 4], [0, 0, 1])
    step = walk(tree, torch.tensor([[5, 4, 9]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [0]


def test_padding_and_duplicates_change_nothing() -> None:
    tree = tree_of([7, 5, 5, 4, PAD_TOKEN], [0, 0, 0, 2, 0])
    step = walk(tree, torch.tensor([[5, 4, 4, 9, 5]]), tree.ancestors(), depth=2)
    assert step.count.tolist() == [2]
    assert step.tokens.tolist() == [[5, 4, 9]]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_walk_equals_a_descent_by_hand(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    parents = [0] + [data.draw(st.integers(0, i - 1)) for i in range(1, count)]
    tokens = [data.draw(st.integers(0, 2)) for _ in range(count)]
    used: set[tuple[int, int]] = set()
    for i in range(1, count):
        if (parents[i], tokens[i]) in used:
            tokens[i] = PAD_TOKEN
        used.add((parents[i], tokens[i]))
    choices = [data.draw(st.integers(0, 2)) for _ in range(count)]
    tree = tree_of(tokens, parents)
    depth = int(tree.depths.max())
    step = walk(tree, torch.tensor([choices]), tree.ancestors(depth), depth)

    node, path = 0, [0]
    while True:
        child = next(
            (i for i in range(1, count) if i != node and parents[i] == node and tokens[i] == choices[node]), None
        )
        if child is None:
            break
        node = child
        path.append(node)
    accepted = len(path) - 1
    assert step.count.tolist() == [accepted]
    assert step.path[0, : accepted + 1].tolist() == path
    assert step.tokens[0, : accepted + 1].tolist() == [choices[i] for i in path]
