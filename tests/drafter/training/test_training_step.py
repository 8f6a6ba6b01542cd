from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from drafter.training.settings import TrainingSettings
from drafter.training.targets import draft_batch
from drafter.training.teacher import teacher_labels
from drafter.training.training_step import TrainingStep, base_hidden_states
from tests.support.heads import DEPTH, make_head, random_texts, text_loss

BATCH = draft_batch(random_texts(3), DEPTH, 16)


def test_hidden_states_are_what_the_lm_head_reads(tiny_base: BaseModel) -> None:
    logits = tiny_base.model(input_ids=BATCH.tokens[:1]).logits
    assert torch.allclose(tiny_base.lm_head(base_hidden_states(tiny_base, BATCH.tokens))[:1], logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["context 1", "medusa", "hydra"])
def test_labels_are_the_text_or_the_teachers(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    total, weight = TrainingStep(tiny_base, head, TrainingSettings())(BATCH)
    expected = text_loss(head, tiny_base, BATCH)
    assert (total.item(), weight.item()) == (expected.total.item(), expected.weight.item())

    hidden = base_hidden_states(tiny_base, BATCH.tokens)
    labels = teacher_labels(tiny_base, head, BATCH, hidden, 3, 0.5)
    soft, _ = TrainingStep(tiny_base, head, TrainingSettings(teacher=3, teacher_temperature=0.5))(BATCH)
    assert soft.item() == head(tiny_base, BATCH, hidden, labels).total.item()
    assert soft.item() != pytest.approx(total.item(), rel=1e-3)


@pytest.mark.parametrize("teacher", [0, 2])
@pytest.mark.parametrize("kind", ["ctc", "context 2", "hydra++"])
def test_text_after_the_targets_changes_nothing(tiny_base: BaseModel, kind: str, teacher: int) -> None:
    """It changes the base's states and distributions there, but not the loss. The text of the targets does."""
    step = TrainingStep(tiny_base, make_head(tiny_base, kind), TrainingSettings(teacher=teacher))
    texts = random_texts(2)
    first = texts[0].prompt_length + DEPTH

    def loss(start: int) -> float:
        """Loss of the first anchor of each text, with another text from `start` on."""
        changed = [[*text.tokens[:start], *((t + 1) % 97 for t in text.tokens[start:])] for text in texts]
        batch = draft_batch([replace(t, tokens=c) for t, c in zip(texts, changed, strict=True)], DEPTH, 1)
        total, _ = step(batch)
        return float(total)

    assert loss(first) == pytest.approx(loss(100), rel=1e-6)
    assert loss(first - 2) != pytest.approx(loss(100), rel=1e-4)


def test_stored_hidden_states_replace_the_bases(tiny_base: BaseModel) -> None:
    step = TrainingStep(tiny_base, make_head(tiny_base, "ctc"), TrainingSettings())
    hidden = base_hidden_states(tiny_base, BATCH.tokens)
    assert step(replace(BATCH, hidden=hidden))[0].item() == step(BATCH)[0].item()
    assert step(replace(BATCH, hidden=-hidden))[0].item() != step(BATCH)[0].item()


@pytest.mark.parametrize("kind", ["ctc", "context 2", "medusa", "hydra++"])
def test_bf16_is_close_and_the_gradients_stay_float32(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind).requires_grad_()
    total, weight = TrainingStep(tiny_base, head, TrainingSettings())(BATCH)
    rounded, same_weight = TrainingStep(tiny_base, head, TrainingSettings(precision="bf16"))(BATCH)
    assert rounded.item() == pytest.approx(total.item(), rel=0.02)
    assert rounded.item() != total.item()
    assert same_weight.item() == pytest.approx(weight.item())
    rounded.backward()
    assert {parameter.grad.dtype for parameter in head.parameters() if parameter.grad is not None} == {torch.float32}
