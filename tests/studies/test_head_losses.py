"""The study's own copy of the loss that ships is that loss, and an accepted mass is what verification would accept."""

from __future__ import annotations

import torch

from drafter.ctc.losses import IMPOSSIBLE, _conditional
from studies.head_losses import ARMS


def arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    scores, probs = torch.randn(3, 4, 2, generator=random) - 4, torch.rand(3, 4, 2, generator=random)
    prefixes = torch.rand(3, 4, generator=random).log().cumsum(1)
    counted = torch.arange(4)[:, None] < torch.tensor([4, 2, 0])[:, None, None]
    return torch.where(counted, scores, IMPOSSIBLE), prefixes, counted.expand(3, 4, 2), probs / probs.sum(-1, True)


def test_the_first_arm_is_the_loss_that_ships() -> None:
    found, expected = ARMS["as it ships"][0](*arguments(1), 0.8), _conditional(*arguments(1), 0.8)
    torch.testing.assert_close((found.total, found.weight), (expected.total, expected.weight))


def test_accepted_mass_and_weights_by_hand() -> None:
    """One text of two tokens; the head gives the first a half, and the second a quarter."""
    prefixes = torch.tensor([[0.5, 0.125]]).log()
    scores = torch.tensor([[[0.5, 0.25], [0.125, 0.25]]]).log()
    probs, counted = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]), torch.ones(1, 2, 2, dtype=torch.bool)
    accepted = ARMS["acceptance"][0](scores, prefixes, counted, probs, 1.0)
    by_hand = -torch.tensor([0.5 + 0.25, 0.25 + 0.5]).log().sum()
    torch.testing.assert_close(accepted.total, by_hand)
    weighted = ARMS["positions"][0](scores, prefixes, counted, probs, 1.0)
    first, second = 0.75, 0.75 * 0.625
    losses = -(probs * torch.tensor([[[0.5, 0.25], [0.25, 0.5]]]).log()).sum(-1)[0]
    torch.testing.assert_close(weighted.total, (first + second) * losses[0] + second * losses[1])
    assert float(weighted.weight) == 1
