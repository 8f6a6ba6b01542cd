"""Texts through draft trees on the host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.tree.paths import ROOT, children_of, follow, left_behind

# The text's end has the children 4 and 5; 4 has 6, and 6 has 7.
TOKENS, PARENTS = [4, 5, 6, 7], [ROOT, ROOT, 0, 2]


def test_a_text_is_followed_through_a_tree() -> None:
    assert follow(TOKENS, PARENTS, []) == []
    assert follow(TOKENS, PARENTS, [4]) == [0]
    assert follow(TOKENS, PARENTS, [4, 6, 7, 1]) == [0, 2, 3]
    assert follow(TOKENS, PARENTS, [5, 6]) == [1]
    assert follow(TOKENS, PARENTS, [6]) == follow([], [], [4]) == []


def test_what_is_left_has_places_and_depths_of_its_own() -> None:
    assert left_behind(TOKENS, PARENTS, [4]) == [(2, ROOT, 1), (3, 0, 2)]
    assert left_behind(TOKENS, PARENTS, [4], depth=1) == [(2, ROOT, 1)]
    assert left_behind(TOKENS, PARENTS, [], depth=1) == [(0, ROOT, 1), (1, ROOT, 1)]
    assert left_behind(TOKENS, PARENTS, [9]) == left_behind(TOKENS, PARENTS, [4, 6, 7]) == []


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 9)))]
    rank = {node: place for below in children_of(parents).values() for place, node in enumerate(below)}
    return [rank[node] for node in range(len(parents))], parents  # siblings differ


def paths(tokens: list[int], parents: list[int]) -> dict[tuple[int, ...], int]:
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(parents):
        found[node] = (*found[parent], tokens[node])
    return {path: node for node, path in found.items()}


@given(trees(), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 6))
def test_paths_are_those_of_the_tree(tree: tuple[list[int], list[int]], text: list[int], depth: int) -> None:
    nodes = paths(*tree)
    beginnings = [tuple(text[:end]) for end in range(1, len(text) + 1)]
    known = [one in nodes for one in [*beginnings, None]].index(False)
    assert follow(*tree, text) == [nodes[one] for one in beginnings[:known]]
    left = left_behind(*tree, text, depth)
    below = {path[len(text) :] for path in nodes if path[: len(text)] == tuple(text)} - {()}
    found = paths([tree[0][node] for node, _, _ in left], [parent for _, parent, _ in left])
    assert found.keys() - {()} == {path for path in below if len(path) <= depth}
    assert all(len(path) == left[place][2] for path, place in found.items() if path)
