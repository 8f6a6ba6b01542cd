"""Background requests enter last and are parked first: no other request waits for them, and none changes a token."""

from __future__ import annotations

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.errors import QueueFullError
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.models import (
    AdversarialDrafter,
    SpellingTokenizer,
    finish,
    plainly,
    random_prompts,
    tokens_of,
)
from tests.support.tapes import queue_steps


def engine_of(
    base: BaseModel, slots: int, *, drafts: bool = False, kv_gib: float | None = None, queue: int = 99
) -> Engine:
    drafter = AdversarialDrafter(3, nodes=4) if drafts else PlainDecoding()
    config = EngineConfig(
        max_num_seqs=slots, num_draft_tokens=4, max_model_len=4 * BLOCK, kv_gib=kv_gib, max_queue=queue
    )
    return Engine(base, drafter, SpellingTokenizer(), config)


def requests_of(count: int, tokens: int, *, background: bool, salts: tuple[str, ...] = ("",)) -> list[Request]:
    return [
        Request(
            prompt,
            SamplingParams(tokens, temperature=0.7 * (row % 2), seed=row, ignore_eos=True),
            salt=salts[row % len(salts)],
            background=background,
        )
        for row, prompt in enumerate(random_prompts(count, seed=7 + background))
    ]


def decoded(engine: Engine) -> list[bool]:
    """Whether each row that the next step decodes is a background one."""
    return [one.background for one in engine.scheduler.active]


def test_a_request_enters_before_background_ones_that_came_first_and_parks_those_in_slots(
    tiny_base: BaseModel,
) -> None:
    engine = engine_of(tiny_base, 2)
    behind = [engine.submit(one) for one in requests_of(6, 30, background=True)]
    while not engine.scheduler.active:
        engine.step()
    assert decoded(engine) == [True, True]
    steps = engine.state().steps
    live = engine.submit(requests_of(1, 5, background=False)[0])
    while not live.future.done():
        engine.step()
        assert not any(decoded(engine))
    # Its first token comes with its prompt, and each of the others is a step of its own.
    assert engine.state().steps - steps == 5
    assert live.result(0).counts.num_decode_steps == 5
    assert len(engine.scheduler.background) == 4
    assert len(engine.scheduler.parked) == 2
    assert sum(one.future.done() for one in behind) == 0
    finish(engine, behind)


def test_background_rows_go_on_where_they_were_and_few_read_again(tiny_base: BaseModel) -> None:
    """With a free slot none is; without one it is the row whose slot the other one took."""
    for slots, read_again in ((5, 0), (4, 1)):
        engine = engine_of(tiny_base, slots)
        requests = requests_of(4, 40, background=True)
        behind = [engine.submit(one) for one in requests]
        while len(engine.scheduler.active) < 4:
            engine.step()
        before = engine.state().prefilled_tokens
        prompt = requests_of(1, 5, background=False)
        live = engine.submit(prompt[0])
        while not live.future.done():
            engine.step()
        assert tokens_of(finish(engine, behind)) == tokens_of(plainly(tiny_base, requests))
        again = engine.state().prefilled_tokens - before - (len(prompt[0].prompt_ids) - 1)
        assert bool(again) == bool(read_again)
        assert again <= max(len(one.prompt_ids) for one in requests) + 40 if read_again else again == 0


def test_prompts_that_are_being_read_wait_again(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request does not wait until long background prompts are read."""
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine = engine_of(tiny_base, 4)
    long = [Request([3 + row, *range(10, 40)], SamplingParams(3), background=True, salt=str(row)) for row in range(3)]
    behind = [engine.submit(one) for one in long]
    engine.step()
    assert engine.scheduler.entering
    before = engine.state().prefilled_tokens
    request = requests_of(1, 1, background=False)[0]
    live = engine.submit(request)
    engine.step()
    assert live.future.done()
    assert engine.state().prefilled_tokens - before == len(request.prompt_ids) - 1
    assert tokens_of(finish(engine, behind)) == tokens_of(plainly(tiny_base, long))


def test_a_request_that_comes_while_background_prompts_are_read_is_read_next(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them would be read in one step otherwise."""
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 32)
    engine = engine_of(tiny_base, 6)
    long = [Request([3 + row, *range(10, 40)], SamplingParams(3), background=True) for row in range(6)]
    behind = [engine.submit(one) for one in long]
    request = Request([5, 6, 7], SamplingParams(3, ignore_eos=True))
    background: list[bool] = []
    read, live = engine._prefill, list[Handle]()

    def prefill() -> None:
        background.append(engine.scheduler.entering[0].background)
        read()
        if len(background) == 3:
            live.append(engine.submit(request))

    monkeypatch.setattr(engine, "_prefill", prefill)
    engine.step()
    assert background == [True, True, True, False]
    assert tokens_of(finish(engine, [*behind, *live])) == tokens_of(plainly(tiny_base, [*long, request]))


def test_a_full_background_queue_refuses_no_other_request(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, 1, queue=2)
    for one in requests_of(2, 3, background=True):
        engine.submit(one)
    with pytest.raises(QueueFullError):
        engine.submit(requests_of(1, 3, background=True)[0])
    for one in requests_of(2, 3, background=False):
        engine.submit(one)
    with pytest.raises(QueueFullError):
        engine.submit(requests_of(1, 3, background=False)[0])
    finish(engine)


def test_a_parked_device_lets_background_rows_run(tiny_base: BaseModel) -> None:
    """A row that its own handle has parked takes no part in steps, and needs none to itself."""
    engine = engine_of(tiny_base, 3)
    device = engine.submit(requests_of(1, 20, background=False)[0])
    while not engine.scheduler.active:
        engine.step()
    device.park()
    behind = engine.submit(requests_of(1, 4, background=True)[0])
    while not behind.future.done():
        engine.step()
    assert not device.future.done()
    other = engine.submit(requests_of(1, 30, background=True)[0])
    engine.step()
    device.unpark()
    while not device.future.done():
        engine.step()
        assert True not in decoded(engine) or device.future.done()
    assert not other.future.done()
    other.cancel()
    finish(engine)


@pytest.mark.parametrize("behind", [False, True])
def test_tokens_are_those_of_plain_decoding_where_memory_is_short(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Requests come and go beside background rows of two salts, also in engines that read outcomes a step later."""
    background = requests_of(9, 50, background=True, salts=("one", "two"))
    live = requests_of(8, 9, background=False, salts=("one", "three"))
    expected = tokens_of(plainly(tiny_base, [*background, *live]))
    if behind:
        queue_steps(monkeypatch)
    kv_bytes = (8 + SPARE) * BLOCK * sum(tiny_base.kv_bytes_per_token)
    engine = engine_of(tiny_base, 3, drafts=True, kv_gib=kv_bytes / 2**30)
    handles = [engine.submit(one) for one in background]
    for one in live:
        for _ in range(6):
            engine.step()
        handles.append(engine.submit(one))
    assert tokens_of(finish(engine, handles)) == expected
