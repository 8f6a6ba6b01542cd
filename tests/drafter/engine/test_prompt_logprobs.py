"""Log-probabilities of prompts: those of the model's own forward, whatever else the batch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.drafters.contract import PlainDecoding
from drafter.errors import RequestError
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.marks import slow_but
from tests.support.models import (
    VOCABULARY,
    AdversarialDrafter,
    base_of,
    engine_of,
    finish,
    random_prompts,
)

SAMPLING = SamplingParams(max_new_tokens=4, ignore_eos=True)
FAMILIES = ["llama", "gemma2", "granite", "gpt2", "phi3"]
"""Some change the logits after the LM head."""


def reference(base: BaseModel, prompt: list[int]) -> Tensor:
    """Log-probabilities `[P - 1, V]` of the tokens after the first, by transformers alone."""
    with torch.no_grad():
        logits: Tensor = base.model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1)


def check(found: Generation, base: BaseModel, prompt: list[int], count: int) -> None:
    assert found.prompt_logprobs is not None
    assert [one.token_id for one in found.prompt_logprobs] == prompt
    assert (found.prompt_logprobs[0].logprob, found.prompt_logprobs[0].top) == (None, ())
    for one, row in zip(found.prompt_logprobs[1:], reference(base, prompt), strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        best = row.topk(count)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", slow_but(FAMILIES[:2], FAMILIES))
def test_they_are_those_of_the_models_own_forward(family: str, stream: bool) -> None:
    base = base_of(family)
    engine = engine_of(base, AdversarialDrafter(0, nodes=4), max_num_seqs=3, max_model_len=64)
    prompts = random_prompts(8)
    prompts[5] = prompts[4]  # a prefix that is there already is not copied: it has no logits
    handles = [
        engine.submit(Request(prompt, SAMPLING, prompt_logprobs=2 if place % 3 else None), stream=stream)
        for place, prompt in enumerate(prompts)
    ]
    finish(engine)
    for place, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        if place % 3:
            check(handle.result(0), base, prompt, 2)
        else:
            assert handle.result(0).prompt_logprobs is None


def test_a_long_prompt_is_scored_in_parts(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler._SCORED_CHUNK", 16)
    prompt = [3 + place * 7 % (VOCABULARY - 3) for place in range(100)]
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=2, max_model_len=120)
    others = [engine.submit(Request(prompt, SAMPLING)) for _ in range(2)]
    handle = engine.submit(Request(prompt, SAMPLING, prompt_logprobs=0))
    finish(engine)
    check(handle.result(0), tiny_base, prompt, 0)
    assert handle.result(0).token_ids == others[0].result(0).token_ids == others[1].result(0).token_ids


def test_a_number_of_alternatives_that_cannot_be() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs must be an integer"):
        Request([1], prompt_logprobs=21)
