"""Every method's drafts for a target model with recurrent layers, whose tokens stay those of `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from drafter.drafters.contract import Drafter
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.errors import LoadError
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.draft_models.drafter import StackedDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.hybrids import hybrid_model
from tests.support.marks import slow_but
from tests.support.models import generate_reference, random_model, random_prompts, run_engine

FAMILIES = ("qwen3_5_text", "granitemoehybrid", "lfm2")
HEADS = ("ctc", "context 2", "medusa", "hydra++", "eagle3", "specformer")


@cache
def base_of(family: str) -> BaseModel:
    return BaseModel(hybrid_model(family))


DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "ngram": lambda base: NgramDrafter(),
    "memory": lambda base: MemoryDrafter(),
    "cacheback": lambda base: CachebackDrafter(),
    "draft model": lambda base: StackedDrafter(CachebackDrafter(12), BaseModel(random_model("llama")), base, 6),
    **{kind: lambda base, kind=kind: make_head(base, kind).drafter(base, 8) for kind in HEADS},  # type: ignore[misc]
}


@pytest.mark.parametrize("family", slow_but(FAMILIES[:1], FAMILIES))
def test_every_methods_tokens_are_those_of_generate(family: str) -> None:
    base, prompts = base_of(family), random_prompts(4, seed=1)
    expected = [generate_reference(base.model, prompt, 10) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(10)) for prompt in prompts]
    for name, make in DRAFTERS.items():
        found = run_engine(base, make(base), requests, max_num_seqs=3, num_draft_tokens=8)
        assert [one.token_ids for one in found] == expected, name


def test_first_layers_with_a_state_do_not_draft() -> None:
    with pytest.raises(LoadError, match="has recurrent layers, and cannot draft"):
        FirstLayersDrafter(base_of("lfm2"), 2, 8)
