""""""

from __future__ import annotations

import torch

from drafter.target.attention import additive, tree_attention_mask

# Root with two children; row 0 has one committed position, row 1 has three.
LENGTHS = torch.tensor([1, 3])
DEPTHS = torch.tensor([[0, 1, 1], [0, 1, 1]])
ANCESTORS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, 3, 3)


def test_nodes_see_the_row_and_their_ancestors_and_nothing_else() -> None:
    mask = tree_attention_mask(LENGTHS, DEPTHS, ANCESTORS, 7)
    assert mask.int().tolist() == [
        [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0]],
    ]


def test_a_window_counts_positions_not_cache_places() -> None:
    # Both children are at position 4, though the second lies at place 5: a window of 3 starts at position 2 for both.
    mask = tree_attention_mask(LENGTHS[1:], DEPTHS[1:], ANCESTORS[1:], 6, window=3)
    assert mask[0].int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1]]


def test_a_chunk_ends_at_its_border() -> None:
    mask = tree_attention_mask(LENGTHS[1:], DEPTHS[1:], ANCESTORS[1:], 6, chunk=2)
    assert mask[0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def test_additive_masks_are_finite() -> None:
    mask = additive(torch.tensor([[[True, False]]]), torch.bfloat16)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.isfinite().all()
    assert mask[0, 0, 0, 0] == 0
    assert mask[0, 0, 0, 1] < -1e30
