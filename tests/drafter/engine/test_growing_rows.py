"""Rows that take KV memory as they grow: more of them decode together, and nobody's tokens change."""

from __future__ import annotations

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.models import decode, engine_of, finish, plainly, random_prompts, tokens_of

MAX_LENGTH = 4 * BLOCK


def gib(base: BaseModel, blocks: int) -> float:
    """Memory for so many blocks."""
    return (blocks + SPARE) * BLOCK * base.new_cache(1, 1).nbytes / 2**30


def test_rows_leave_while_a_prompt_is_read_in_pieces(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 16)
    prompts = [[3 + (row + place) % 90 for place in range(70 if row % 3 else 5)] for row in range(9)]
    requests = [
        Request(prompt, SamplingParams(4 + 3 * row, temperature=row % 2, seed=row, ignore_eos=True))
        for row, prompt in enumerate(prompts)
    ]
    expected = plainly(tiny_base, requests, max_model_len=MAX_LENGTH)
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=4, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 10))
    assert tokens_of(decode(engine, requests, stream=True)) == tokens_of(expected)
    engine.scheduler.kept.clear()
    assert not engine.batch.cache.blocks.table.any()


def test_the_youngest_gives_way_and_the_oldest_never(tiny_base: BaseModel) -> None:
    sampling = SamplingParams(100, ignore_eos=True)
    requests = [Request(prompt, sampling) for prompt in random_prompts(3, seed=4)]
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=3, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 5))
    handles = [engine.submit(request) for request in requests]
    ended: list[int] = []
    while not engine.idle:
        engine.step()
        ended += [row for row, handle in enumerate(handles) if handle.future.done() and row not in ended]
    assert ended == [0, 1, 2]
    assert engine.state().preemptions >= 2


def test_unwanted_rows_give_their_memory_back(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=6, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 8))
    handles = [engine.submit(Request(one, SamplingParams(60, ignore_eos=True))) for one in random_prompts(6, seed=5)]
    engine.step()
    for handle in handles[1:4]:
        handle.cancel()
    finish(engine)
    assert [len(handle.result(0).token_ids) for handle in handles[4:]] == [60, 60]
    engine.scheduler.kept.clear()
    assert not engine.batch.cache.blocks.table.any()


def test_memory_that_holds_no_row_is_refused(tiny_base: BaseModel) -> None:
    with pytest.raises(LoadError, match=r"holds 64 positions .* one request may need .* raise kv_gib or lower"):
        engine_of(tiny_base, PlainDecoding(), max_num_seqs=6, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 2))


def test_memory_for_all_is_not_shared(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=2, max_model_len=MAX_LENGTH, kv_gib=1.0)
    assert (
        engine.batch.cache.nbytes == engine.batch.cache.slots * engine.batch.capacity * tiny_base.new_cache(1, 1).nbytes
    )
