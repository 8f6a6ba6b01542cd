""""""

from __future__ import annotations

import pytest
import torch

from drafter.ctc.config import CTCHeadConfig
from drafter.ctc.head import CTCHead
from drafter.ctc.losses import prefix_loss
from drafter.heads.losses import Labels
from drafter.target_model.model import BaseModel
from drafter.training.targets import base_hidden_states, draft_batch
from tests.support.heads import DEPTH, make_head, random_texts, text_loss


def test_log_probs_are_normalised_and_the_blank_starts_improbable(tiny_base: BaseModel) -> None:
    head = CTCHead(CTCHeadConfig(hidden_size=32, vocab_size=97, num_heads=2))
    log_probs = head.log_probs(torch.randn(2, 8, 32), tiny_base.lm_head)
    assert log_probs.shape == (2, 8, 98)
    assert log_probs.logsumexp(-1).abs().max().item() < 1e-5
    assert log_probs[0, 0, -1].exp().item() == pytest.approx(0.0474, abs=1e-3)


def test_the_loss_is_that_of_the_whole_vocabulary(tiny_base: BaseModel) -> None:
    """The head computes it from a row's few symbols. It equals the loss over all symbols, for hard and soft labels."""
    head = make_head(tiny_base, "ctc", depth_decay=0.5)
    assert isinstance(head, CTCHead)
    batch = draft_batch(random_texts(1), DEPTH, 16)
    batch.targets[0, :, 1] = batch.targets[0, :, 0]  # a text that repeats itself
    hidden = base_hidden_states(tiny_base, batch.tokens)
    states = head.module(tiny_base.embed(batch.tokens), hidden, batch.anchors)[0]
    log_probs = head.log_probs(states, tiny_base.lm_head)
    text = prefix_loss(log_probs, batch.targets[0], batch.lengths[0], 0.5)
    assert text_loss(head, tiny_base, batch).mean().item() == pytest.approx(text.mean().item(), rel=1e-5)

    # One label is the text's, one is the token before it, and so a repeat, and one is neither.
    before = batch.targets.roll(1, 2)
    tokens = torch.stack([batch.targets, before, (before + 1) % 97], 3)
    labels = Labels(tokens, torch.tensor([0.5, 0.3, 0.2]).expand(tokens.shape))
    soft = prefix_loss(log_probs, batch.targets[0], batch.lengths[0], 0.5, Labels(labels.tokens[0], labels.probs[0]))
    assert head(tiny_base, batch, hidden, labels).mean().item() == pytest.approx(soft.mean().item(), rel=1e-5)
    assert soft.weight.item() < text.weight.item()  # what five frames cannot reach is dropped


def test_the_lattice_loss_without_a_joint_is_the_frames_own(tiny_base: BaseModel) -> None:
    """With the joint's output at zero and a band of one, frame `u` emits label `u`: plain cross-entropy."""
    head = make_head(tiny_base, "context 1", band=1)
    assert isinstance(head, CTCHead)
    torch.nn.init.zeros_(head.joint_out.weight)
    batch = draft_batch(random_texts(2), DEPTH, 16)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    states = head.module(tiny_base.embed(batch.tokens), hidden, batch.anchors, DEPTH).flatten(0, 1)
    log_probs = head.log_probs(states, tiny_base.lm_head)
    entropy = -log_probs.gather(2, batch.targets.flatten(0, 1)[..., None])[..., 0]
    weights = (torch.arange(DEPTH) < batch.lengths.flatten()[:, None]) * 0.8 ** torch.arange(DEPTH)
    expected = (entropy * weights).sum() / weights.sum()
    assert text_loss(head, tiny_base, batch).mean().item() == pytest.approx(expected.item(), rel=1e-4)


def test_without_a_blank_frames_emit_their_own_token(tiny_base: BaseModel) -> None:
    """Cross-entropy trains a head without a blank: frame `u` predicts token `u`."""
    head = make_head(tiny_base, "ctc, cross-entropy")
    assert isinstance(head, CTCHead)
    assert not any("blank" in name for name, _ in head.named_parameters())
    batch = draft_batch(random_texts(1), DEPTH, 16)
    states = head.module(tiny_base.embed(batch.tokens), base_hidden_states(tiny_base, batch.tokens), batch.anchors)[
        0, :, :DEPTH
    ]
    said = head.token_log_probs(states, tiny_base.lm_head).gather(2, batch.targets[0, :, :, None])[..., 0]
    weights = (torch.arange(DEPTH) < batch.lengths[0, :, None]) * 0.8 ** torch.arange(DEPTH)
    expected = -(said * weights).sum() / weights.sum()
    assert text_loss(head, tiny_base, batch).mean().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 5}, "even width"),
        ({"depth": 9}, "depth is at most"),
        ({"label_context": -1}, "label_context"),
        ({"label_context": 1, "loss": "ctc"}, "prefix"),
        ({"num_frames": 7, "loss": "ce"}, "depth must be num_frames"),
        ({"num_layers": 0}, "num_layers"),
        ({"band": 0}, "band"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CTCHeadConfig(hidden_size=32, vocab_size=97, **wrong)  # type: ignore[arg-type]
