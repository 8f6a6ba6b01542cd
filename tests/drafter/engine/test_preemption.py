"""When memory runs out rows give up their slots; nobody's tokens change, and nobody hears of it."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import cycle, product

import pytest
import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, Loan, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.exhaustion import run_out
from tests.support.heads import make_head
from tests.support.marks import slow_but_tuples
from tests.support.models import (
    AdversarialDrafter,
    OracleDrafter,
    base_of,
    engine_of,
    finish,
    plainly,
    random_prompts,
    texts_of,
)

NEW_TOKENS = 24


def requests_of(count: int) -> list[Request]:
    """Greedy and random ones, with penalties, so that a wrong prompt length or position would be seen."""
    return [
        Request(
            prompt,
            SamplingParams(
                NEW_TOKENS, temperature=float(row % 2), seed=row, frequency_penalty=0.5, logprobs=1, ignore_eos=True
            ),
        )
        for row, prompt in enumerate(random_prompts(count, seed=6))
    ]


class Small(Drafter):
    """A drafter on a device that cannot hold more than so many rows."""

    def __init__(self, inner: Drafter, rows: int) -> None:
        self._inner, self._rows = inner, rows
        self.spec = inner.spec
        self.prepare = inner.prepare  # type: ignore[method-assign]

    def open(self, loan: Loan) -> None:
        self._inner.open(loan)
        self.slots = self._inner.slots

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tree = self._inner.propose(context, ask)  # so that its memory has moved on when the step fails
        if context.tokens.shape[0] > self._rows:
            raise torch.OutOfMemoryError("no memory for the tree")
        return tree


def submit_all(engine: Engine, requests: list[Request], *, stream: bool = True) -> list[Handle]:
    return [engine.submit(request, stream=stream) for request in requests]


def check_results(handles: list[Handle], expected: list[Generation]) -> None:
    """The same tokens, log-probabilities and text, in whole and in pieces."""
    for handle, plain in zip(handles, expected, strict=True):
        found = handle.result(0)
        assert (found.token_ids, found.text, found.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
        if handle.streams:
            deltas = list(handle)
            assert [token for delta in deltas for token in delta.token_ids] == plain.token_ids
            assert "".join(delta.text for delta in deltas) == plain.text
        assert found.logprobs is not None
        assert plain.logprobs is not None
        assert [one.token_id for one in found.logprobs] == plain.token_ids
        logprobs = [one.logprob for one in plain.logprobs]
        assert [one.logprob for one in found.logprobs] == pytest.approx(logprobs, abs=1e-4)
        assert found.counts.num_output_tokens == len(plain.token_ids)


def test_rows_that_do_not_fit_are_decoded_later() -> None:
    base = base_of("gemma2")
    requests = requests_of(11)
    expected = plainly(base, requests)
    texts = texts_of(requests, expected)
    heads: list[Drafter] = [make_head(base, kind).drafter(base, 8) for kind in ("ctc", "hydra++")]
    for inner in (OracleDrafter(texts), AdversarialDrafter(seed=3), reduce(MergedDrafter, heads)):
        engine = engine_of(base, Small(inner, rows=3), max_num_seqs=9, num_draft_tokens=6)
        handles = submit_all(engine, requests)
        while not engine.idle:
            engine.step()
            assert len(engine.scheduler.active) <= 9
        check_results(handles, expected)
        # 9 rows, then 5, then 3, which is what fits.
        assert (engine.state().slots, engine.state().preemptions) == (3, 6)


def test_rows_come_back_when_memory_reaches_again(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, up to all slots; and where it never reaches for more, the engine lives on with what fits."""
    monkeypatch.setattr("drafter.engine.row_limit._BACKOFF", 2)
    requests = requests_of(24)
    expected = plainly(tiny_base, requests)
    monkeypatch.setitem(vars(tiny_base), "verify", run_out(tiny_base.verify, {3}))
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=6)
    handles, most = submit_all(engine, requests), [6]
    while not engine.idle:
        engine.step()
        most += [engine.state().slots] * (engine.state().slots != most[-1])
    check_results(handles, expected)
    assert most == [6, 3, 4, 5, 6]
    engine = engine_of(tiny_base, Small(AdversarialDrafter(3), rows=2), max_num_seqs=6, num_draft_tokens=4)
    handles = submit_all(engine, requests)
    finish(engine)
    check_results(handles, expected)
    assert engine.state().preemptions > 4  # 6 rows, then 3, then 2, and later 3 again


STAGES = ("prefill", "prefill together", "prefill_last", "verify", "forward", "commit", "read")
FAILURES = list(product(STAGES, [False, True]))


@pytest.mark.parametrize(("stage", "late"), slow_but_tuples(zip(STAGES, cycle([False, True]), strict=False), FAILURES))
def test_memory_may_run_out_at_any_stage(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, stage: str, late: bool
) -> None:
    if stage == "prefill":  # by models with an attention of their own, one after another
        monkeypatch.setitem(vars(tiny_base), "allow_packing", lambda: False)
    requests = requests_of(8)
    expected = plainly(tiny_base, requests)
    texts = texts_of(requests, expected)
    engine = engine_of(tiny_base, OracleDrafter(texts, depth=2), max_num_seqs=8, num_draft_tokens=4)
    owner, name = {
        "prefill": (tiny_base, "prefill"),
        "prefill together": (tiny_base, "prefill"),
        "prefill_last": (tiny_base, "prefill_last"),
        "verify": (tiny_base, "verify"),
        "forward": (tiny_base.model.lm_head, "forward"),
        "commit": (engine.batch.cache, "commit"),
        "read": (engine.budget, "observe"),
    }[stage]
    # Later, the prompt's last piece is that of a row alone, which is an error.
    calls = {"prefill_last": {3}, "prefill together": {1, 2}}.get(stage, {3, 6})
    # By the dictionary, because `setattr` would leave a bound method behind on what all tests share.
    monkeypatch.setitem(vars(owner), name, run_out(getattr(owner, name), calls, late=late))
    # Who does not watch has no first token from the prompt's forward, but all the others.
    handles = submit_all(engine, requests, stream=not stage.startswith("prefill") or stage == "prefill_last")
    finish(engine)
    check_results(handles, expected)
    assert engine.state().preemptions > 0
    assert engine.state().slots < 8


def test_a_prompt_that_is_being_read_is_put_back_too(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 4)
    requests = requests_of(6)
    requests[0] = replace(requests[0], prompt=[5])
    requests[1] = replace(requests[1], prompt=list(range(3, 33)))
    expected = plainly(tiny_base, requests)
    monkeypatch.setitem(vars(tiny_base), "prefill", run_out(tiny_base.prefill, {3}))  # of the long prompt
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=6)
    handles = submit_all(engine, requests)
    for _ in range(3):
        engine.step()
    assert (engine.state().active, engine.state().waiting, engine.state().slots) == (1, 5, 1)
    finish(engine)
    check_results(handles, expected)


def test_a_row_that_does_not_fit_alone_is_an_error(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, Small(AdversarialDrafter(0), rows=0), max_num_seqs=4, num_draft_tokens=4)
    submit_all(engine, requests_of(4))
    engine.step()
    engine.step()
    assert len(engine.scheduler.active) == 1
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
