from __future__ import annotations

import math

import pytest
import torch

from drafter.acceptance.contract import Verified
from drafter.drafters.contract import PlainDecoding
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from recipes.pad.training import RecordingVerifier
from tests.drafter.acceptance.test_contract import tree_of
from tests.methods.pad.test_pad import row_of
from tests.support.models import AdversarialDrafter, run_engine, tokens_of


def test_the_first_child_where_the_path_ends_is_noted() -> None:
    """The base chooses 3 and then 5: node 2 is accepted, and of its children 4 and 1 the first is rejected."""
    tree = tree_of([7, 0, 3, 4, 1], [0, 0, 0, 2, 2])
    logits = torch.zeros(1, 5, 6)
    logits[0, 0, 3] = 9
    logits[0, 2, 5] = math.log(5)  # and five others of 1: the rejected one has a probability of 1/10
    read = torch.arange(5.0)[None, :, None].expand(1, 5, 2)
    recorder = RecordingVerifier(0)
    recorder.accept(Verified(tree, tree.ancestors(), 2, logits, torch.zeros(1, 5, 0), read), row_of(SamplingParams()))
    (one,) = recorder.take()
    assert recorder.take() == []
    assert (one.prefix, one.prompt_tokens, one.rejected, one.chosen) == ([0, 0, 3], 1, 4, 5)
    assert one.probability == pytest.approx(0.1)
    assert one.entropy == pytest.approx(-0.5 * math.log(0.5) - 0.5 * math.log(0.1))
    assert one.hidden.tolist() == [3, 3]


def test_a_path_that_ends_at_a_leaf_rejects_nothing() -> None:
    tree = tree_of([7, 3], [0, 0])
    logits = torch.zeros(1, 2, 6)
    logits[0, :, 3] = 9
    recorder = RecordingVerifier(0)
    base = Verified(tree, tree.ancestors(), 1, logits, torch.zeros(1, 2, 0), torch.zeros(1, 2, 2))
    recorder.accept(base, row_of(SamplingParams()))
    assert recorder.take() == []


def test_in_an_engine_tokens_stay_exact_and_what_is_noted_is_true(tiny_base: BaseModel) -> None:
    requests = [Request([5, 6, 7 + row], SamplingParams(12, ignore_eos=True)) for row in range(4)]
    expected = tokens_of(run_engine(tiny_base, PlainDecoding(), requests))
    recorder = RecordingVerifier(1)
    found = run_engine(
        tiny_base, AdversarialDrafter(1), requests, verifier=recorder, num_draft_tokens=8, max_num_seqs=2
    )
    assert tokens_of(found) == expected
    assert all(one.lossless for one in found)
    texts = [[*request.prompt_ids, *tokens] for request, tokens in zip(requests, expected, strict=True)]
    noted = [one for one in recorder.take() if any(text[: len(one.prefix)] == one.prefix for text in texts)]
    assert len(noted) > 10
    assert {one.prompt_tokens for one in noted} == {3}
    for one in noted[:10]:
        output = tiny_base.model(torch.tensor([[*one.prefix, one.rejected]]), output_hidden_states=True)
        log_probs = output.logits[0, -2].double().log_softmax(-1)
        assert int(log_probs.argmax()) == one.chosen != one.rejected
        assert one.probability == pytest.approx(float(log_probs[one.rejected].exp()), rel=1e-3)
        assert one.entropy == pytest.approx(float(-(log_probs.exp() * log_probs).sum()), rel=1e-3)
        torch.testing.assert_close(one.hidden, output.hidden_states[2][0, -1], rtol=1e-3, atol=1e-3)
