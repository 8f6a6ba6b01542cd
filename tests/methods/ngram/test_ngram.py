""""""

from __future__ import annotations

import torch

from drafter.drafters.prompt_lookup import lookup
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import run_engine


def test_lookup_prefers_the_longest_and_then_the_newest_match() -> None:
    text = torch.tensor([[1, 2, 3, 9, 8, 2, 3, 7, 3, 6, 1, 2, 3, 0]])
    paths, weights = lookup(text, torch.tensor([12]), depth=2, matches=3)
    assert paths.tolist() == [[[9, 8], [7, 3], [6, 1]]]
    assert weights[0, 0] == 0
    assert weights[0, 0] > weights[0, 1] > weights[0, 2]


def test_lookup_without_a_match_proposes_nothing() -> None:
    _, weights = lookup(torch.tensor([[1, 2, 3, 3]]), torch.tensor([2]), depth=2, matches=3)
    assert weights.isneginf().all()


def test_ngram_trees_never_reach_past_the_text(tiny_base: BaseModel) -> None:
    request = Request([5, 6, 7, 8] * 4, SamplingParams(max_new_tokens=20, ignore_eos=True))
    counts = run_engine(tiny_base, NgramDrafter(8), [request], max_num_seqs=2, num_draft_tokens=8)[0].counts
    assert counts.num_draft_tokens > 0
    # Every step emits its accepted tokens and a bonus token, but for the last, which the limit may cut short.
    assert counts.num_output_tokens == 20
    assert 20 - sum(counts.per_step_accepted) in (counts.num_decode_steps, counts.num_decode_steps - 1)
