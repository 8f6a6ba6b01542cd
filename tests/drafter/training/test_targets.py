from __future__ import annotations

import pytest
import torch

from drafter.training.targets import RegeneratedText, anchor_draws, count_targets, draft_batch


def test_anchors_have_only_the_bases_own_targets() -> None:
    text = RegeneratedText([10, 11, 12, 20, 21, 22], prompt_length=3)
    # The first pending token is the last prompt token; the last text token has nothing after it.
    assert list(text.anchors) == [2, 3, 4]
    assert list(RegeneratedText([1, 2], prompt_length=2).anchors) == []


def test_continuations_are_counted_and_prompts_are_not() -> None:
    texts = [RegeneratedText([4, 4, 1, 1, 2], prompt_length=2), RegeneratedText([3, 1], prompt_length=1)]
    assert count_targets(texts, 5).tolist() == [0, 3, 1, 0, 0]


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
    first, again = (draft_batch([text], 4, 20, anchor_draws(3, 7, [0])) for _ in range(2))
    assert torch.equal(first.anchors, again.anchors)
    assert first.anchors.unique().numel() == 20
    assert first.anchors.min().item() >= 9
    assert torch.equal(first.targets[0, :, 0], first.anchors[0] + 1)


def test_a_texts_anchors_are_drawn_by_seed_step_and_place() -> None:
    """A worker with the second half of a step draws the same anchors as a worker with the whole step."""
    texts = [RegeneratedText(range(100), 10)] * 4
    whole = draft_batch(texts, 4, 20, anchor_draws(3, 7, range(4)))
    half = draft_batch(texts[2:], 4, 20, anchor_draws(3, 7, range(2, 4)))
    assert torch.equal(whole.anchors[2:], half.anchors)
    assert not torch.equal(whole.anchors[0], whole.anchors[1])
    for seed, step in ((4, 7), (3, 8)):
        assert not torch.equal(whole.anchors, draft_batch(texts, 4, 20, anchor_draws(seed, step, range(4))).anchors)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_targets_are_the_following_tokens(depth: int) -> None:
    text = RegeneratedText(range(50, 70), 5)
    batch = draft_batch([text], depth, 50)
    for anchor, targets, length in zip(batch.anchors[0], batch.targets[0], batch.lengths[0], strict=True):
        assert int(length) == min(depth, 19 - int(anchor))
        assert targets[:length].tolist() == [51 + int(anchor) + i for i in range(int(length))]


def test_stored_hidden_states_come_along_only_where_every_text_has_them() -> None:
    with_states = [RegeneratedText(range(n), 2, torch.full((n, 3), float(n))) for n in (5, 7)]
    hidden = draft_batch(with_states, 4, 8).hidden
    assert hidden is not None
    assert hidden[..., 0].tolist() == [[5.0] * 5 + [0.0] * 2, [7.0] * 7]
    assert draft_batch([with_states[0], RegeneratedText(range(7), 2)], 4, 8).hidden is None
