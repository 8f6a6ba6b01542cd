""""""

from __future__ import annotations

import torch

from drafter.drafters.contract import DraftContext
from drafter.heads.frame_head import LastHidden, ResidualBlocks, hidden_before

HIDDEN = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])


def test_the_state_before_an_anchor() -> None:
    anchors = torch.tensor([[0, 1, 3], [2, 2, 1]])
    assert hidden_before(HIDDEN, anchors)[..., 0].tolist() == [[0.0, 1.0, 3.0], [5.0, 5.0, 4.0]]


def test_the_newest_state_is_that_before_the_pending_token() -> None:
    context = DraftContext(torch.zeros(2, 3, dtype=torch.long), HIDDEN, torch.tensor([0, 2]), [0, 2])
    assert LastHidden().read(context)[..., 0].tolist() == [[0.0], [5.0]]


def test_the_last_hidden_state_is_a_frame() -> None:
    frames = LastHidden()(torch.zeros_like(HIDDEN), HIDDEN, torch.tensor([[1], [3]]))
    assert frames[..., 0].tolist() == [[[1.0]], [[6.0]]]


def test_residual_blocks_start_as_the_last_hidden_state() -> None:
    module = ResidualBlocks(width=1, num_frames=2)
    anchors = torch.tensor([[1, 2], [1, 3]])
    assert module(torch.zeros_like(HIDDEN), HIDDEN, anchors)[..., 0].tolist() == [[[1, 1], [2, 2]], [[4, 4], [6, 6]]]


def test_a_residual_block_by_hand() -> None:
    module = ResidualBlocks(width=1, num_frames=2)
    with torch.no_grad():
        module.blocks[1].weight.fill_(3.0)  # type: ignore[operator]
        module.blocks[1].bias.fill_(-1.0)  # type: ignore[operator]
    # h + SiLU(3 h − 1) of h = 2, and SiLU(5) = 5 σ(5).
    assert torch.allclose(module.frames(torch.tensor([2.0])), torch.tensor([[2.0], [2.0 + 5.0 * 0.9933071]]))
    assert module.frames(torch.tensor([2.0]), 1).tolist() == [[2.0]]
