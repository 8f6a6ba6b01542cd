"""Recurrences over draft trees give what each path gives by itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter.target_model.tree_scan import TreePaths, TreeScan, convolution_windows, delta_values, path_sums
from tests.support.properties import examples
from tests.support.trees import random_paths

HEADS, KEY, VALUE = 2, 3, 4


def draw(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_convolution_reads_along_the_path_and_into_the_text() -> None:
    # 0 → 1 → 3, 0 → 2, behind a text that ends with 7, 8, 9
    parents = torch.tensor([[0, 0, 0, 1]])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()[None]
    windows = convolution_windows(
        torch.tensor([[[10.0, 11, 12, 13]]]), torch.tensor([[[7.0, 8, 9]]]), TreePaths(parents, ancestors)
    )
    assert windows[0, 0].tolist() == [[8, 9, 10], [9, 10, 11], [9, 10, 12], [10, 11, 13]]


def test_the_depths_are_listed_from_the_roots_on() -> None:
    parents = torch.tensor([[0, 0, 1], [0, 0, 0]])
    ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    levels = [list(zip(*map(Tensor.tolist, level), strict=True)) for level in TreePaths(parents, ancestors).levels]
    assert levels == [[(0, 0), (1, 0)], [(0, 1), (1, 1), (1, 2)], [(0, 2)]]


@given(st.integers(1, 9), st.integers(0, 10_000), st.booleans(), st.booleans())
@examples(60)
def test_a_scan_is_the_recurrence_of_each_path(nodes: int, seed: int, by_component: bool, delta: bool) -> None:
    rows = 2
    paths = random_paths(rows, nodes, seed)
    keys, queries = (draw(rows, HEADS, nodes, KEY, seed=seed + one) for one in (1, 2))
    values, state = draw(rows, HEADS, nodes, VALUE, seed=seed + 3), draw(rows, HEADS, KEY, VALUE, seed=seed + 4)
    decays = -draw(rows, HEADS, nodes, KEY if by_component else 1, seed=seed + 5).abs()
    rates = draw(rows, HEADS, nodes, 1, seed=seed + 6).sigmoid()
    sums = path_sums(decays, paths.ancestors)
    written = delta_values(state, keys, values, rates, sums, paths.ancestors) if delta else values
    scan = TreeScan(state, keys, written, sums, paths.ancestors)
    read = scan.read(queries)
    for row in range(rows):
        after = torch.empty(nodes, HEADS, KEY, VALUE, dtype=torch.float64)
        for node in range(nodes):
            before = after[paths.parents[row, node]] if node else state[row]
            before = before * decays[row, :, node, :, None].exp()
            key, value = keys[row, :, node], values[row, :, node]
            if delta:
                value = rates[row, :, node] * (value - torch.einsum("hk,hkv->hv", key, before))
            after[node] = before + key[:, :, None] * value[:, None]
            here = torch.einsum("hk,hkv->hv", queries[row, :, node], after[node])
            assert torch.allclose(read[row, :, node], here)
        every = torch.arange(nodes)
        assert torch.allclose(scan.after(torch.full((nodes,), row), every), after)
