from __future__ import annotations

import math

import pytest
import torch

from drafter.heads.losses import Labels, LossSum, cross_entropy, hard_labels


def test_hard_labels_are_certain() -> None:
    labels = hard_labels(torch.tensor([[4, 7]]))
    assert labels.tokens.tolist() == [[[4], [7]]]
    assert labels.probs.tolist() == [[[1.0], [1.0]]]


def test_labels_are_chosen_by_a_mask() -> None:
    labels = Labels(torch.tensor([[[1, 2]], [[3, 4]]]), torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]))
    chosen = labels[torch.tensor([False, True])]
    assert chosen.tokens.tolist() == [[[3, 4]]]
    assert chosen.probs.tolist() == [[[0.5, 0.5]]]


def test_cross_entropy_by_hand() -> None:
    log_probs = torch.tensor([[[0.5], [0.3]]]).log()
    loss = cross_entropy(log_probs, hard_labels(torch.tensor([[0, 2]])), torch.tensor([2]), decay=0.5)
    assert loss.total.item() == pytest.approx(-math.log(0.5) - 0.5 * math.log(0.3))
    assert loss.weight.item() == 1.5
    assert loss.mean().item() == pytest.approx(loss.total.item() / 1.5)


def test_cross_entropy_of_soft_labels_by_hand() -> None:
    labels = Labels(torch.tensor([[[0, 1], [2, 0]]]), torch.tensor([[[0.75, 0.25], [1.0, 0.0]]]))
    log_probs = torch.tensor([[[0.5, 0.3], [0.3, 0.1]]]).log()
    loss = cross_entropy(log_probs, labels, torch.tensor([2]), decay=0.5)
    expected = -0.75 * math.log(0.5) - 0.25 * math.log(0.3) - 0.5 * math.log(0.3)
    assert loss.total.item() == pytest.approx(expected)
    assert loss.weight.item() == 1.5


def test_places_past_the_end_do_not_count() -> None:
    log_probs = torch.tensor([[[-1.0], [-2.0], [-8.0]], [[-4.0], [-8.0], [-8.0]]], requires_grad=True)
    labels = hard_labels(torch.zeros(2, 3, dtype=torch.long))
    loss = cross_entropy(log_probs, labels, torch.tensor([2, 1]), decay=0.5)
    assert loss.total.item() == 1.0 + 0.5 * 2.0 + 4.0
    assert loss.weight.item() == 2.5
    loss.total.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[..., 0].tolist() == [[-1.0, -0.5, 0.0], [-1.0, 0.0, 0.0]]


def test_without_terms_the_loss_is_zero() -> None:
    assert LossSum(torch.tensor(0.0), torch.tensor(0.0)).mean().item() == 0.0
