from __future__ import annotations

import random

import pytest
import torch

from drafter.training.targets import RegeneratedText, draft_batch


def test_anchors_have_only_the_bases_own_targets() -> None:
    text = RegeneratedText([10, 11, 12, 20, 21, 22], prompt_length=3)
    # The first pending token is the last prompt token; the last text token has nothing after it.
    assert list(text.anchors) == [2, 3, 4]
    assert list(RegeneratedText([1, 2], prompt_length=2).anchors) == []


def test_literal_batch() -> None:
    texts = [RegeneratedText([10, 11, 20, 21, 22], 2), RegeneratedText([30, 40, 41], 1)]
    batch = draft_batch(texts, depth=2, most_anchors=8)
    assert batch.tokens.tolist() == [[10, 11, 20, 21, 22], [30, 40, 41, 0, 0]]
    assert batch.anchors.tolist() == [[1, 2, 3], [0, 1, 0]]
    assert batch.lengths.tolist() == [[2, 2, 1], [2, 1, 0]]
    assert batch.targets[0].tolist() == [[20, 21], [21, 22], [22, 0]]
    assert batch.targets[1, :2].tolist() == [[40, 41], [41, 0]]


def test_drawn_anchors_are_distinct_and_seeded() -> None:
    text = RegeneratedText(range(100), 10)
    first = draft_batch([text], 4, 20, random.Random(3))
    again = draft_batch([text], 4, 20, random.Random(3))
    assert torch.equal(first.anchors, again.anchors)
    assert first.anchors.unique().numel() == 20
    assert first.anchors.min().item() >= 9
    assert torch.equal(first.targets[0, :, 0], first.anchors[0] + 1)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_targets_are_the_following_tokens(depth: int) -> None:
    text = RegeneratedText(range(50, 70), 5)
    batch = draft_batch([text], depth, 50)
    for anchor, targets, length in zip(batch.anchors[0], batch.targets[0], batch.lengths[0], strict=True):
        assert int(length) == min(depth, 19 - int(anchor))
        assert targets[:length].tolist() == [51 + int(anchor) + i for i in range(int(length))]
