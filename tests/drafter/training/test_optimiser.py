from __future__ import annotations

from typing import Any

import pytest
import torch

from drafter.errors import TrainingError
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.target_model.model import BaseModel
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import draft_batch
from tests.support.heads import DEPTH, random_texts, text_loss, untrained_head

TEXTS = random_texts(4)


def whole() -> DraftBatch:
    return draft_batch(TEXTS, DEPTH, 16)


def optimiser_of(base: BaseModel, **settings: Any) -> tuple[DraftHead, TorchOptimiser]:
    head = untrained_head(base, "ctc")
    training = TrainingSettings(**{"steps": 6, "warmup_steps": 2, **settings})
    return head, TorchOptimiser(TrainingStep(base, head, training), training)


def weights(head: DraftHead) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_an_update_reports_loss_norm_and_rate(tiny_base: BaseModel) -> None:
    head, optimiser = optimiser_of(tiny_base, learning_rate=0.01, clip=1e-3)
    loss = text_loss(head, tiny_base, whole()).mean()
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(head.parameters()))]).norm()
    before, base_before = weights(head), {k: v.clone() for k, v in tiny_base.model.state_dict().items()}
    update = optimiser.update([whole()])
    assert update.loss == pytest.approx(loss.item())
    assert update.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
    assert update.learning_rate == pytest.approx(0.005)  # the first of two steps of warm-up
    assert optimiser.steps == 1
    assert not any(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    assert all(torch.equal(tensor, base_before[name]) for name, tensor in tiny_base.model.state_dict().items())


def farthest(base: BaseModel, **settings: Any) -> float:
    """Largest change of a parameter in the first step."""
    head, optimiser = optimiser_of(base, weight_decay=0.0, warmup_steps=2, **settings)
    before = weights(head)
    optimiser.update([whole()])
    return max(float((tensor - before[name]).abs().max()) for name, tensor in head.state_dict().items())


def test_a_step_is_as_long_as_the_learning_rate_and_the_clipping_say(tiny_base: BaseModel) -> None:
    """Adam's first step is `rate · g / (|g| + 1e-8)`: the rate, unless clipping leaves next to nothing of `g`."""
    assert farthest(tiny_base, learning_rate=0.02) == pytest.approx(0.01, rel=1e-3)
    assert farthest(tiny_base, learning_rate=0.004) == pytest.approx(0.002, rel=1e-3)
    assert farthest(tiny_base, learning_rate=0.02, clip=1e-9) < 0.001


def test_two_micro_batches_are_the_mean_of_their_losses(tiny_base: BaseModel) -> None:
    """Two parts of the same weight take the same step as one batch of both."""
    parts = [draft_batch([text], DEPTH, 5) for text in TEXTS[:2]]
    _, apart = optimiser_of(tiny_base)
    _, together = optimiser_of(tiny_base)
    first, second = apart.update(parts), together.update([draft_batch(TEXTS[:2], DEPTH, 5)])
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-4)


def test_training_resumes_where_it_was_interrupted(tiny_base: BaseModel) -> None:
    unbroken, optimiser = optimiser_of(tiny_base)
    losses = [optimiser.update([whole()]).loss for _ in range(6)]
    first, optimiser = optimiser_of(tiny_base)
    again = [optimiser.update([whole()]).loss for _ in range(3)]
    state, tensors = optimiser.state_dict(), weights(first)
    second, optimiser = optimiser_of(tiny_base)
    second.load_state_dict(tensors)
    optimiser.load_state_dict(state)
    again += [optimiser.update([whole()]).loss for _ in range(3)]
    assert again == losses
    assert same(weights(second), weights(unbroken))


def test_a_loss_that_is_not_finite_changes_nothing(tiny_base: BaseModel) -> None:
    head, optimiser = optimiser_of(tiny_base)
    optimiser.update([whole()])
    good = weights(head)
    with torch.no_grad():
        head.get_parameter("norm.weight")[3] = torch.nan
    broken = weights(head)
    with pytest.raises(TrainingError, match=r"step 2: the loss is nan .*lower the learning rate"):
        optimiser.update([whole()])
    assert all(torch.equal(tensor.nan_to_num(), broken[name].nan_to_num()) for name, tensor in weights(head).items())
    assert optimiser.steps == 1
    # Training goes on from the last good weights as if nothing had happened.
    head.load_state_dict(good)
    goes_on = optimiser.update([whole()])
    _, other = optimiser_of(tiny_base)
    other.update([whole()])
    assert goes_on == other.update([whole()])
