from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.drafters.contract import Drafter
from drafter.drafters.target import Target
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, Labels, LossSum
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.loop import TrainingStep, training_layers
from drafter.training.settings import TrainingSettings
from drafter.training.targets import base_hidden_states, draft_batch, teacher_labels
from drafter.tree.token_tree import TokenTree
from tests.support.heads import DEPTH, make_head, random_texts, text_loss

BATCH = draft_batch(random_texts(3), DEPTH, 16)


def test_hidden_states_are_what_the_lm_head_reads(tiny_base: BaseModel) -> None:
    logits = tiny_base.model(input_ids=BATCH.tokens[:1]).logits
    assert torch.allclose(tiny_base.lm_head(base_hidden_states(tiny_base, BATCH.tokens))[:1], logits, atol=1e-5)


def test_hidden_states_of_several_layers_are_side_by_side(tiny_base: BaseModel) -> None:
    states = tiny_base.model(input_ids=BATCH.tokens, output_hidden_states=True).hidden_states
    # Entry 0 is the embedding, and the last one comes after the final norm.
    expected = torch.cat([states[2], states[-1], states[1]], -1)
    assert torch.allclose(base_hidden_states(tiny_base, BATCH.tokens, (1, LM_HEAD_INPUT, 0)), expected, atol=1e-5)


class Recorder(DraftHead):
    """Keeps what it is given. It reads the outputs of two layers."""

    hidden_layers = (0, 2)

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(vocab_size=97, depth=DEPTH))

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        self.hidden, self.labels = hidden, labels
        return LossSum(hidden.sum(), hidden.new_ones(()))

    def drafter(self, *args: Any, **kwargs: Any) -> Drafter:
        raise NotImplementedError

    def trees_at(self, *args: Any, **kwargs: Any) -> TokenTree:
        raise NotImplementedError


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("teacher", "layers"), [(0, (0, 2)), (3, (0, 2, LM_HEAD_INPUT))])
def test_a_head_gets_the_layers_it_names_and_the_teacher_the_last(
    tiny_base: BaseModel, teacher: int, layers: tuple[int, ...], stored: bool
) -> None:
    head, settings = Recorder(), TrainingSettings(teacher=teacher)
    assert training_layers(head, settings) == layers
    batch = replace(BATCH, hidden=base_hidden_states(tiny_base, BATCH.tokens, layers)) if stored else BATCH
    TrainingStep(tiny_base, head, settings)(batch)
    assert torch.equal(head.hidden, base_hidden_states(tiny_base, BATCH.tokens, (0, 2)))
    if teacher:
        last = base_hidden_states(tiny_base, BATCH.tokens)
        expected = teacher_labels(tiny_base, head, BATCH, last, teacher, settings.teacher_temperature)
        assert torch.equal(head.labels.probs, expected.probs)


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
