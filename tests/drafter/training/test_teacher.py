from __future__ import annotations

import pytest
import torch

from drafter.drafters.contract import PlainDecoding
from drafter.heads import losses as chosen_log_probs
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.training.targets import RegeneratedText, base_hidden_states, draft_batch, teacher_labels
from tests.support.heads import make_head, random_texts
from tests.support.models import random_prompts, run_engine


@pytest.mark.parametrize("portion", [1 << 20, 500])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_labels_are_the_likeliest_tokens_of_the_model(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, portion: int, temperature: float
) -> None:
    """Place by place, from the model's own logits after the tokens before the target."""
    monkeypatch.setattr(chosen_log_probs, "_RANKED", portion)
    batch, head = draft_batch(random_texts(2), 3, 16), make_head(tiny_base, "ctc")
    hidden = base_hidden_states(tiny_base, batch.tokens)
    labels = teacher_labels(tiny_base, head, batch, hidden, 4, temperature)
    assert labels.tokens.shape == labels.probs.shape == (*batch.targets.shape, 4)
    for row, anchors in enumerate(batch.anchors.tolist()):
        for place, anchor in enumerate(anchors):
            for u in range(int(batch.lengths[row, place])):
                text = batch.tokens[row : row + 1, : anchor + u + 1]
                probs = (tiny_base.model(input_ids=text).logits[0, -1] / temperature).softmax(0)
                best = probs.topk(4)
                assert labels.tokens[row, place, u].tolist() == best.indices.tolist()
                expected = best.values / best.values.sum()
                assert torch.allclose(labels.probs[row, place, u], expected, atol=1e-5)


def test_in_a_greedy_text_the_likeliest_token_is_the_text(tiny_base: BaseModel) -> None:
    prompts = random_prompts(4, seed=1)
    settings = SamplingParams(max_new_tokens=12, ignore_eos=True)
    made = run_engine(tiny_base, PlainDecoding(), [Request(prompt, settings) for prompt in prompts], max_num_seqs=4)
    texts = [RegeneratedText(p + m.token_ids, len(p)) for p, m in zip(prompts, made, strict=True)]
    batch = draft_batch(texts, 4, 32)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    labels = teacher_labels(tiny_base, make_head(tiny_base, "ctc"), batch, hidden, 1, 1.0)
    real = torch.arange(4) < batch.lengths[:, :, None]
    assert int(real.sum()) > 100
    assert torch.equal(labels.tokens[..., 0][real], batch.targets[real])
    assert labels.probs.unique().tolist() == [1.0]


def test_a_draft_vocabulary_has_labels_of_its_own_tokens(tiny_base: BaseModel) -> None:
    """With the weights that the base gives them if one of its tokens follows."""
    head = make_head(tiny_base, "ctc", draft_vocab_size=20)
    batch = draft_batch(random_texts(1), 3, 4)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    labels = teacher_labels(tiny_base, head, batch, hidden, 20, 1.0)
    probs = tiny_base.lm_head(hidden)[0, batch.anchors[0]].softmax(1)[:, :20]
    best = (probs / probs.sum(1, keepdim=True)).sort(descending=True)
    assert torch.equal(labels.tokens[0, :, 0], best.indices)
    assert torch.allclose(labels.probs[0, :, 0], best.values, atol=1e-5)
