"""Whoever drafts a step, and whoever has not for long: the tokens are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from drafter.budget.adaptive import AdaptiveBudget
from drafter.budget.contract import FixedBudget
from drafter.drafters.contract import Ask, DraftContext, PlainDecoding
from drafter.drafters.merged import ChoosingDrafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.heads import make_head
from tests.support.marks import slow_but
from tests.support.models import (
    AdversarialDrafter,
    SpellingTokenizer,
    base_of,
    decode,
    engine_of,
    random_prompts,
    run_engine,
    tokens_of,
)
from tests.support.tapes import queue_steps

NAMES = ("lattice", "head", "random", "none")


def choosing(base: BaseModel) -> ChoosingDrafter:
    members = (
        make_head(base, "context 2").drafter(base, 8),
        make_head(base, "ctc, causal").drafter(base, 8),
        AdversarialDrafter(0, nodes=5),  # asked for more nodes than it has
        PlainDecoding(),
    )
    return ChoosingDrafter(dict(zip(NAMES, members, strict=True)))


class ChangingBudget(FixedBudget):
    """Asks another member, for another number of nodes, every few steps."""

    def __init__(self, seed: int, members: int = len(NAMES)) -> None:
        super().__init__(8)
        self._random, self._count = random.Random(seed), members
        self.members: list[int] = []
        self._next()

    def plan(self, rows: int) -> Ask:
        if self._random.random() < 0.4:
            self._next()
        self.members.append(self._planned.member)
        return self._planned

    def _next(self) -> None:
        self._planned = Ask(self._random.choice([0, 3, 8]), 0.05, self._random.randrange(self._count))


@pytest.mark.parametrize("family", slow_but(["gemma2"], ["gemma2", "gpt2"]))
@pytest.mark.parametrize("slots", [1, 4])
def test_tokens_stay_those_of_plain_decoding(family: str, slots: int) -> None:
    base = base_of(family)
    requests = [
        Request(prompt, SamplingParams(24, temperature=0.8 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(9, seed=3))
    ]
    expected = run_engine(base, PlainDecoding(), requests)
    budget = ChangingBudget(seed=slots)
    config = EngineConfig(max_num_seqs=slots, num_draft_tokens=8, max_model_len=96)
    engine = Engine(base, choosing(base), SpellingTokenizer(), config, budget=budget)
    assert tokens_of(decode(engine, requests)) == tokens_of(expected)
    assert set(budget.members) == set(range(len(NAMES)))


def test_on_a_gpu_members_are_graphs_of_their_own_but_for_one_that_drafts_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = base_of("llama")
    requests = [
        Request(prompt, SamplingParams(30, temperature=0.8 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(9, seed=3))
    ]
    expected = run_engine(base, PlainDecoding(), requests)
    ahead = set[int]()

    class OnHost(AdversarialDrafter):
        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            ahead.add(context.ahead)
            return super().propose(context, ask)

    recorder, on_host = queue_steps(monkeypatch), OnHost(1, nodes=5)
    on_host.spec = replace(on_host.spec, graph_safe=False)
    head = make_head(base, "context 2").drafter(base, 8)
    drafter = ChoosingDrafter({"head": head, "random": AdversarialDrafter(0, nodes=8), "host": on_host})
    budget = ChangingBudget(seed=2, members=3)
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=8, max_model_len=96)
    engine = Engine(base, drafter, SpellingTokenizer(), config, budget=budget)
    assert tokens_of(decode(engine, requests)) == tokens_of(expected)
    assert set(budget.members) == set(range(3))
    assert recorder.repeated > engine.state().steps
    assert ahead == {0}  # no step was under way, whoever drafted before


def test_drafters_may_draft_together_as_a_member_of_their_own() -> None:
    base = base_of("llama")
    together = [("head", "lattice"), ("lattice", "random")]
    members = {
        "head": make_head(base, "ctc").drafter(base, 8),
        "lattice": make_head(base, "context 2").drafter(base, 8),
        "random": AdversarialDrafter(0, nodes=5),
    }
    drafter = ChoosingDrafter(members, together)
    assert list(drafter.members) == ["head", "lattice", "random", "head+lattice", "lattice+random"]
    requests = [Request(prompt, SamplingParams(24, ignore_eos=True)) for prompt in random_prompts(5, seed=3)]
    expected = run_engine(base, PlainDecoding(), requests)
    budget = ChangingBudget(seed=0, members=len(drafter.members))
    engine = Engine(
        base,
        drafter,
        SpellingTokenizer(),
        EngineConfig(max_num_seqs=2, num_draft_tokens=8, max_model_len=96),
        budget=budget,
    )
    assert tokens_of(decode(engine, requests)) == tokens_of(expected)
    assert set(budget.members) == set(range(5))


@pytest.mark.slow
@pytest.mark.measuring
def test_an_engine_measures_its_members_and_chooses() -> None:
    base = base_of("llama")
    engine = engine_of(base, choosing(base), max_num_seqs=2, num_draft_tokens="auto", max_model_len=96)
    assert isinstance(engine.budget, AdaptiveBudget)
    requests = [Request(prompt, SamplingParams(80, ignore_eos=True)) for prompt in random_prompts(12, seed=4)]
    found = decode(engine, requests)
    expected = run_engine(base, PlainDecoding(), requests, max_model_len=96)
    assert tokens_of(found) == tokens_of(expected)
    for choice in engine.budget.choices():
        assert {view.name for view in choice.members} <= set(NAMES)
        assert choice.verdict is None or choice.chosen in NAMES
    assert engine.budget.choices()
