"""Log-probabilities of what tokens are drawn from: after temperature, penalties, bias and filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.marks import slow_but
from tests.support.models import AdversarialDrafter, base_of, engine_of, finish, random_prompts, tokens_of

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.9, "logit_bias": {7: 3.0}, "min_p": 0.01},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.6, "min_p": 0.01},
]


def scores_after(base: BaseModel, request: Request, found: Generation) -> Tensor:
    """Logits `[N, V]` at the output's places, by transformers alone, after bias and temperature."""
    text = [*request.prompt_ids, *found.token_ids]
    with torch.no_grad():
        logits: Tensor = base.model(torch.tensor([text])).logits[0, len(request.prompt_ids) - 1 : -1].double()
    for token, bias in dict(request.sampling.logit_bias).items():
        logits[:, token] += bias
    return logits / (request.sampling.over().temperature or 1.0)


def filtered(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities of all tokens, of which those that are filtered out have none."""
    params, probs = sampling.over(), scores.softmax(-1)
    if not params.temperature:  # nothing is drawn
        return probs
    ranked, order = probs.sort(-1, descending=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k:
        kept[:, params.top_k :] = False
    kept &= ranked.cumsum(-1) - ranked < params.top_p
    kept &= ranked >= params.min_p * ranked[:, :1]
    probs = probs.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), 0.0)
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("family", slow_but(["llama"], ["llama", "granite", "gpt2"]))
@pytest.mark.parametrize("stream", [False, True])
def test_they_are_those_of_the_distribution_that_tokens_are_drawn_from(family: str, stream: bool) -> None:
    """Beside rows that want the model's own, or none; drafted tokens as those of plain steps."""
    base = base_of(family)
    requests = [
        Request(
            prompt,
            SamplingParams(12, logprobs=3 if row % 4 < 3 else None, seed=row, ignore_eos=True, **SETTINGS[row % 5]),
            drawn_logprobs=row % 4 < 2,
        )
        for row, prompt in enumerate(random_prompts(20))
    ]
    engine = engine_of(base, AdversarialDrafter(0, nodes=6), max_num_seqs=5, max_model_len=64)
    results = finish(engine, [engine.submit(request, stream=stream) for request in requests])
    assert sum(one.counts.num_accepted_draft_tokens for one in results) > 0
    for request, found in zip(requests, results, strict=True):
        if request.sampling.logprobs is None:
            assert found.logprobs is None
            continue
        plain = Request(request.prompt, SamplingParams(12))
        if request.drawn_logprobs:
            wanted = filtered(scores_after(base, request, found), request.sampling).log()
        else:
            wanted = scores_after(base, plain, found).log_softmax(-1)
        assert found.logprobs is not None
        for one, row in zip(found.logprobs, wanted, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
            best = row.topk(3).values
            assert [value for _, value in one.top] == pytest.approx(best.tolist(), abs=1e-4)


def test_they_change_no_token() -> None:
    base, found = base_of("llama"), []
    for drawn in (False, True):
        engine = engine_of(base, AdversarialDrafter(0, nodes=4), max_num_seqs=2, max_model_len=64)
        settings = SamplingParams(10, temperature=0.8, top_k=20, logprobs=0)
        handles = [engine.submit(Request(prompt, settings, drawn_logprobs=drawn)) for prompt in random_prompts(5)]
        found.append(tokens_of(finish(engine, handles)))
    assert found[0] == found[1]
