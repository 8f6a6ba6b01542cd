"""Rows that take KV memory as they grow: more of them decode together, and nobody's tokens change."""

from __future__ import annotations

from functools import reduce

import pytest

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.marks import slow_but
from tests.support.models import (
    FAMILIES,
    AdversarialDrafter,
    OracleDrafter,
    SpellingTokenizer,
    plainly,
    random_model,
    random_prompts,
)
from tests.support.tapes import queue_steps

MAX_LENGTH = 4 * BLOCK


def gib(base: BaseModel, blocks: int) -> float:
    """Memory for so many blocks."""
    return (blocks + SPARE) * BLOCK * base.new_cache(1, 1).nbytes / 2**30


def requests_of(count: int) -> list[Request]:
    """Some short ones, some that grow over several blocks."""
    return [
        Request(
            prompt,
            SamplingParams(
                80 if row % 4 == 0 else 12, temperature=row % 2, seed=row, presence_penalty=0.5, ignore_eos=True
            ),
        )
        for row, prompt in enumerate(random_prompts(count, seed=11))
    ]


@pytest.mark.parametrize("family", slow_but(["gemma2"], FAMILIES))
def test_tokens_are_those_of_rows_alone(family: str) -> None:
    check_tokens(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_those_of_rows_alone_where_the_host_is_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that read each step's outcome one step later, as on a GPU."""
    queue_steps(monkeypatch)
    check_tokens(family)


def check_tokens(family: str) -> None:
    base = BaseModel(random_model(family))
    requests = requests_of(10)
    max_length = min(MAX_LENGTH, base.max_positions or MAX_LENGTH)
    expected = plainly(base, requests, max_model_len=max_length)
    texts = [[*r.prompt_ids, *one.token_ids] for r, one in zip(requests, expected, strict=True)]
    heads: list[Drafter] = [make_head(base, kind).drafter(base, 8) for kind in ("ctc", "hydra++")]
    for drafter in (PlainDecoding(), OracleDrafter(texts), AdversarialDrafter(seed=3), reduce(MergedDrafter, heads)):
        # One of full length takes five blocks at most, draft nodes included.
        config = EngineConfig(max_num_seqs=8, max_model_len=max_length, num_draft_tokens=6, kv_gib=gib(base, 6))
        engine = Engine(base, drafter, SpellingTokenizer(), config)
        handles = [engine.submit(request, stream=row % 3 == 0) for row, request in enumerate(requests)]
        most = 0
        while not engine.idle:
            engine.step()
            most = max(most, len(engine.scheduler.active))
        assert [handle.result(0).token_ids for handle in handles] == [one.token_ids for one in expected]
        assert most >= 3
        engine.scheduler.kept.clear()
        assert not engine.batch.cache.blocks.table.any()  # all memory has been given back


def test_rows_leave_while_a_prompt_is_read_in_pieces(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 16)
    prompts = [[3 + (row + place) % 90 for place in range(70 if row % 3 else 5)] for row in range(9)]
    requests = [
        Request(prompt, SamplingParams(4 + 3 * row, temperature=row % 2, seed=row, ignore_eos=True))
        for row, prompt in enumerate(prompts)
    ]
    expected = plainly(tiny_base, requests, max_model_len=MAX_LENGTH)
    config = EngineConfig(max_num_seqs=4, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 10))
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config)
    handles = [engine.submit(request, stream=True) for request in requests]
    while not engine.idle:
        engine.step()
    assert [handle.result(0).token_ids for handle in handles] == [one.token_ids for one in expected]
    engine.scheduler.kept.clear()
    assert not engine.batch.cache.blocks.table.any()


def test_the_youngest_gives_way_and_the_oldest_never(tiny_base: BaseModel) -> None:
    sampling = SamplingParams(100, ignore_eos=True)
    requests = [Request(prompt, sampling) for prompt in random_prompts(3, seed=4)]
    config = EngineConfig(max_num_seqs=3, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 5))
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config)
    handles = [engine.submit(request) for request in requests]
    ended: list[int] = []
    while not engine.idle:
        engine.step()
        ended += [row for row, handle in enumerate(handles) if handle.future.done() and row not in ended]
    assert ended == [0, 1, 2]
    assert engine.state().preemptions >= 2


def test_unwanted_rows_give_their_memory_back(tiny_base: BaseModel) -> None:
    config = EngineConfig(max_num_seqs=6, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 8))
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config)
    handles = [engine.submit(Request(one, SamplingParams(60, ignore_eos=True))) for one in random_prompts(6, seed=5)]
    engine.step()
    for handle in handles[1:4]:
        handle.cancel()
    while not engine.idle:
        engine.step()
    assert [len(handle.result(0).token_ids) for handle in handles[4:]] == [60, 60]
    engine.scheduler.kept.clear()
    assert not engine.batch.cache.blocks.table.any()


def test_memory_that_holds_no_row_is_refused(tiny_base: BaseModel) -> None:
    config = EngineConfig(max_num_seqs=6, max_model_len=MAX_LENGTH, kv_gib=gib(tiny_base, 2))
    with pytest.raises(LoadError, match=r"holds 64 positions .* one request may need .* raise kv_gib or lower"):
        Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config)


def test_memory_for_all_is_not_shared(tiny_base: BaseModel) -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=MAX_LENGTH, kv_gib=1.0)
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config)
    assert (
        engine.batch.cache.nbytes == engine.batch.cache.slots * engine.batch.capacity * tiny_base.new_cache(1, 1).nbytes
    )
