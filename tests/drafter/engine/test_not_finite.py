"""A sequence whose numbers are not finite ends with an error, and no other sequence ever sees one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.engine.handle import Handle
from drafter.errors import NotFiniteError
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_nodes
from tests.support.caches import kv_of
from tests.support.heads import make_head
from tests.support.marks import slow_but
from tests.support.models import AdversarialDrafter, engine_of, finish, random_model, random_prompts
from tests.support.tapes import queue_steps

POISON = 96
"""A token whose embedding is not finite."""


@cache
def poisoned_base(dtype: torch.dtype = torch.float32, family: str = "llama") -> BaseModel:
    base = BaseModel(random_model(family).to(dtype), native=False)  # which would not ask the embedding below

    def spoil(module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == POISON)[..., None], torch.nan)

    # Not in the weights, which some families share with the LM head.
    base.model.get_input_embeddings().register_forward_hook(spoil)
    return base


class PoisonDrafter(Drafter):
    """Drafts the poison beside and below other tokens. It is never right, as it is forbidden to the base."""

    spec = DraftSpec(max_nodes=5, max_depth=2)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        rows, count = len(context.tokens), self.spec.max_nodes
        tokens = torch.tensor([POISON, 5, 6, POISON, 7]).expand(rows, -1)
        parents = torch.tensor([-1, -1, -1, 1, 2]).expand(rows, -1)
        depths = torch.tensor([1, 1, 1, 2, 2]).expand(rows, -1)
        log_probs = -torch.arange(1.0, count + 1).expand(rows, -1)
        return from_nodes(context.pending, tokens, parents, depths, log_probs, ask.nodes + 1)


DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "none": lambda base: PlainDecoding(),
    "adversarial": lambda base: AdversarialDrafter(0),
    "poison": lambda base: PoisonDrafter(),
    "ctc": lambda base: make_head(base, "ctc").to(base.dtype).drafter(base, 6),
    "ctc, lattice": lambda base: make_head(base, "context 2").to(base.dtype).drafter(base, 6),
    "merged": lambda base: MergedDrafter(make_head(base, "ctc").drafter(base, 6), AdversarialDrafter(0)),
}


@pytest.fixture(params=["the host follows", "the host is behind"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines that look at each step's outcome at once, and engines that read it one step later, as on a GPU."""
    if request.param == "the host is behind":
        queue_steps(monkeypatch)
    return str(request.param)


def innocent_requests(count: int) -> list[Request]:
    """Greedy and random ones; none of them may say the poison."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}]
    return [
        Request(
            [token % POISON for token in prompt],
            SamplingParams(14, seed=row, ignore_eos=True, logit_bias={POISON: -100.0}, **settings[row % 3]),
        )
        for row, prompt in enumerate(random_prompts(count, seed=8))
    ]


def bad_requests() -> list[Request]:
    """The poison at the beginning, within, and at the end of a prompt; and said by the base itself."""
    sampling = SamplingParams(14, ignore_eos=True)
    says_it = SamplingParams(14, ignore_eos=True, logit_bias={POISON: 100.0})
    prompts = [[POISON, 5, 6], [5, POISON, *range(7, 40)], [5, 6, POISON], [POISON]]
    return [*(Request(prompt, sampling) for prompt in prompts), Request([5, 6, 7], says_it)]


def decode(
    base: BaseModel, drafter: Drafter, requests: list[Request], *, stream: bool = False, slots: int = 3
) -> list[Handle]:
    engine = engine_of(base, drafter, max_num_seqs=slots, num_draft_tokens=5, max_model_len=96)
    handles = [engine.submit(request, stream=stream) for request in requests]
    finish(engine)
    assert bool(torch.stack([buffer.isfinite().all() for buffer in kv_of(engine.batch.cache).buffers]).all())
    if engine.batch.hidden is not None:
        assert bool(engine.batch.hidden.isfinite().all())
    return handles


def check(handles: list[Handle], alone: dict[int, list[int]]) -> None:
    """The innocent have what they have alone, by the place of their request; the others have an error."""
    for place, handle in enumerate(handles):
        if place in alone:
            assert handle.result(0).token_ids == alone[place]
        else:
            with pytest.raises(NotFiniteError, match="not finite"):
                handle.result(0)


def check_innocent_rows(make: Callable[[BaseModel], Drafter], *, stream: bool = False) -> None:
    """Those beside bad ones have the tokens that they have alone."""
    base = poisoned_base()
    bad, innocent = bad_requests(), innocent_requests(9)
    requests = [one for pair in itertools.zip_longest(innocent, bad) for one in pair if one is not None]
    alone = {
        place: decode(base, PlainDecoding(), [request], slots=1)[0].result(0).token_ids
        for place, request in enumerate(requests)
        if request in innocent
    }
    check(decode(base, make(base), requests, stream=stream), alone)


@pytest.mark.parametrize("name", slow_but(["none", "ctc"], DRAFTERS))
def test_innocent_rows_keep_their_tokens(device: str, name: str) -> None:
    check_innocent_rows(DRAFTERS[name], stream=name == "ctc")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "poison", "ctc"])
def test_in_half_precision_too(name: str, dtype: torch.dtype) -> None:
    base = poisoned_base(dtype)
    innocent, bad = innocent_requests(4), bad_requests()
    handles = decode(base, DRAFTERS[name](base), [*innocent[:2], *bad, *innocent[2:]])
    for request, handle in zip([*innocent[:2], *bad, *innocent[2:]], handles, strict=True):
        if request in bad:
            with pytest.raises(NotFiniteError):
                handle.result(0)
        else:
            assert len(handle.result(0).token_ids) == 14


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_other_families(family: str) -> None:
    base = poisoned_base(family=family)
    requests = [*innocent_requests(3), bad_requests()[1], *innocent_requests(5)[3:]]
    alone = {
        place: decode(base, PlainDecoding(), [requests[place]], slots=1)[0].result(0).token_ids
        for place in (0, 1, 2, 4, 5)
    }
    check(decode(base, PoisonDrafter(), requests, slots=2), alone)


def test_what_was_said_before_is_handed_out(device: str) -> None:
    """The base says the poison at its third token: those before it are given to who watches, and counted."""
    base = poisoned_base()
    sampling = SamplingParams(14, ignore_eos=True, logit_bias={POISON: 100.0})
    handle = decode(base, PlainDecoding(), [Request([5, 6], sampling)], stream=True)[0]
    assert [token for delta in handle for token in delta.token_ids] == [POISON]
    with pytest.raises(NotFiniteError, match="after 1 generated tokens"):
        handle.result(0)


def test_a_slot_is_clean_after_a_bad_row_was_cancelled(device: str) -> None:
    """Before anybody could know that it is bad, while other rows move."""
    base = poisoned_base()
    innocent = innocent_requests(6)
    alone = {
        place: decode(base, PlainDecoding(), [request], slots=1)[0].result(0).token_ids
        for place, request in enumerate(innocent)
    }
    for steps in range(4):
        engine = engine_of(base, PoisonDrafter(), max_num_seqs=3, num_draft_tokens=5, max_model_len=96)
        handles = [engine.submit(innocent[0])]
        bad = engine.submit(bad_requests()[1])
        handles += [engine.submit(request) for request in innocent[1:]]
        for _ in range(steps):
            engine.step()
        bad.cancel()
        finish(engine)
        check(handles, alone)


def test_who_begins_like_a_bad_row_is_judged_by_its_own_text(device: str) -> None:
    base = poisoned_base()
    beginning = [3 + place * 7 % 90 for place in range(20)]
    sampling = SamplingParams(10, ignore_eos=True, logit_bias={POISON: -100.0})
    requests = [
        Request([*beginning, POISON, *range(10, 30)], sampling),
        Request([*beginning, 5, 6], sampling),
        Request([*beginning, POISON, *range(10, 30), 9], sampling),
        Request([*beginning, 5, 6, 7], sampling),
    ]
    alone = {place: decode(base, PlainDecoding(), [requests[place]])[0].result(0).token_ids for place in (1, 3)}
    check(decode(base, AdversarialDrafter(0), requests, slots=4), alone)


def test_only_the_row_whose_drafts_are_not_finite_goes_on_without(device: str) -> None:
    class PoisonsOne(PoisonDrafter):
        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            tree = super().propose(context, ask)
            harmless = (tree.tokens == POISON) & (context.tokens[:, :1] != 5)
            return replace(tree, tokens=tree.tokens.masked_fill(harmless, 7))

    base = poisoned_base()
    sampling = SamplingParams(14, ignore_eos=True, logit_bias={POISON: -100.0})
    requests = [Request([5, 9, 8], sampling), Request([6, 9, 8], sampling)]
    alone = {
        place: decode(base, PlainDecoding(), [request], slots=1)[0].result(0).token_ids
        for place, request in enumerate(requests)
    }
    handles = decode(base, PoisonsOne(), requests)
    check(handles, alone)
    poisoned, other = (handle.result(0).counts for handle in handles)
    # A host that is behind learns of it when the next step is under way.
    assert 1 <= poisoned.num_spec_steps <= (1 if device == "the host follows" else 2)
    assert other.num_spec_steps >= other.num_decode_steps - 1 > 10
