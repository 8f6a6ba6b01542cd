"""Rows that are parked take no part in steps; their tokens are the same, whether their KV could be kept or not."""

from __future__ import annotations

import pytest

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.engine_thread import EngineThread
from drafter.errors import RequestTimeoutError
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.identity import decode_parked
from tests.support.models import (
    AdversarialDrafter,
    SpellingTokenizer,
    finish,
    plainly,
    random_prompts,
    run_engine,
    tokens_of,
)
from tests.support.tapes import queue_steps

LONG = SamplingParams(40, ignore_eos=True)


def engine_of(base: BaseModel, drafter: Drafter, slots: int, kv_gib: float | None = None) -> Engine:
    config = EngineConfig(max_num_seqs=slots, num_draft_tokens=4, max_model_len=4 * BLOCK, kv_gib=kv_gib)
    return Engine(base, drafter, SpellingTokenizer(), config)


@pytest.mark.parametrize("behind", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_come_back_where_memory_is_short(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Also in engines that read each step's outcome one step later, when a row may have left and come back."""
    requests = [
        Request(prompt, SamplingParams(80 - 6 * row, temperature=0.7 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(9, seed=2))
    ]
    expected = plainly(tiny_base, requests)
    if behind:
        queue_steps(monkeypatch)
    # With few blocks, rows grow at the cost of those that are parked.
    kv_bytes = (8 + SPARE) * BLOCK * sum(tiny_base.kv_bytes_per_token)
    engine = engine_of(tiny_base, AdversarialDrafter(3, nodes=4), 3, kv_bytes / 2**30)
    found, parked = decode_parked(engine, requests, steps=90, seed=3)
    assert tokens_of(found) == tokens_of(expected)
    assert parked > 20


@pytest.mark.parametrize(("slots", "read_again"), [(3, 0), (2, 1)])
def test_kv_is_kept_while_a_slot_is_free(tiny_base: BaseModel, slots: int, read_again: int) -> None:
    requests = [Request(prompt, LONG) for prompt in random_prompts(3, seed=4)]
    expected = plainly(tiny_base, requests)
    engine = engine_of(tiny_base, PlainDecoding(), slots)
    handles = [engine.submit(request) for request in requests[:2]]
    engine.step()
    handles[0].park()
    for _ in range(3):
        engine.step()
    sequence = engine.scheduler.parked[0]
    assert (len(engine.scheduler.in_slots), len(sequence.output)) == (1, 1)
    handles.append(engine.submit(requests[2]))  # takes the last slot, where there is no other
    engine.step()
    before = engine.state().prefilled_tokens
    handles[0].unpark()
    found = finish(engine, handles)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.state().prefilled_tokens - before == read_again * len(requests[0].prompt_ids)


def test_a_row_alone_is_parked_in_its_slot(tiny_base: BaseModel) -> None:
    (request,) = [Request(prompt, LONG) for prompt in random_prompts(1)]
    engine = engine_of(tiny_base, PlainDecoding(), 1)
    handle = engine.submit(request)
    engine.step()
    handle.park()
    assert not engine.idle
    engine.step()
    assert engine.idle
    handle.unpark()
    assert not engine.idle
    assert finish(engine, [handle])[0].token_ids == run_engine(tiny_base, PlainDecoding(), [request])[0].token_ids
    assert engine.state().prefilled_tokens == len(request.prompt_ids) - 1


@pytest.mark.parametrize("slots", [1, 3])
def test_parked_rows_are_cancelled_and_fail_like_others(tiny_base: BaseModel, slots: int) -> None:
    engine = engine_of(tiny_base, PlainDecoding(), slots)
    handles = [engine.submit(Request(prompt, LONG)) for prompt in random_prompts(3)]
    for _ in range(6):
        engine.step()
        for one in engine.scheduler.active:
            one.handle.park()
    assert len(engine.scheduler.parked) == 3
    handles[1].cancel()
    engine.step()
    assert handles[1].result(0).finish_reason == "cancelled"
    assert len(engine.scheduler.parked) == 2
    engine.fail(ValueError("broken"))
    assert all(handle.future.done() for handle in handles)
    assert engine.idle


def test_a_thread_that_steps_is_woken(tiny_base: BaseModel) -> None:
    request = Request([5, 6, 7], LONG)
    engine = engine_of(tiny_base, PlainDecoding(), 2)
    handle, late = engine.submit(request), engine.submit(Request([8, 9], LONG, timeout=0.5))
    handle.park()
    late.park()
    thread = EngineThread(engine)
    try:
        with pytest.raises(RequestTimeoutError):
            late.result(60)
        assert not handle.future.done()
        handle.unpark()
        assert handle.result(60).token_ids == run_engine(tiny_base, PlainDecoding(), [request])[0].token_ids
    finally:
        thread.close()
