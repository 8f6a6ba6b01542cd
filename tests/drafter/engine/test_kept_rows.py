"""Rows that have ended stay for prompts that begin alike: these are not read again, and nobody's tokens change."""

from __future__ import annotations

import random
from functools import cache

import pytest

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.engine.sequence import Handling
from drafter.prompt import Prompt, Span
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.hybrids import hybrid_model
from tests.support.marks import pairwise, slow_but_tuples
from tests.support.models import VOCABULARY, AdversarialDrafter, SpellingTokenizer, finish, random_model, tokens_of
from tests.support.tapes import queue_steps

END = SamplingParams(6, ignore_eos=True)

LONGEST, LONGER = 700, 3_650


@cache
def base_of(family: str) -> BaseModel:
    if family == "llama":
        return BaseModel(random_model(family, max_position_embeddings=LONGER), native=False)
    return BaseModel(hybrid_model(family, max_position_embeddings=LONGER))


def drafter_of(base: BaseModel, kind: str) -> Drafter:
    if kind == "none":
        return PlainDecoding()
    return AdversarialDrafter(3, nodes=4) if kind == "adversarial" else make_head(base, kind).drafter(base, 4)


def engine_of(base: BaseModel, kind: str = "none", slots: int = 4, **config: object) -> Engine:
    config = {"max_model_len": LONGEST, **config}
    settings = EngineConfig(max_num_seqs=slots, num_draft_tokens=4, **config)  # type: ignore[arg-type]
    return Engine(base, drafter_of(base, kind), SpellingTokenizer(), settings)


def text(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(length)]


def ask(engine: Engine, requests: list[Request], *, stream: bool = False) -> list[Generation]:
    handles: list[Handle] = [engine.submit(request, stream=stream) for request in requests]
    return finish(engine, handles)


def read(engine: Engine, request: Request, *, stream: bool = False) -> tuple[int, Generation]:
    """Return how many tokens of a prompt were read, and its result."""
    before = engine.state().prefilled_tokens
    (found,) = ask(engine, [request], stream=stream)
    return engine.state().prefilled_tokens - before, found


@pytest.mark.parametrize(
    ("family", "kind", "stream"),
    [("llama", "none", False), ("llama", "ctc", True), ("llama", "eagle3", False), ("lfm2", "ctc", True)],
)
def test_a_question_is_read_once(family: str, kind: str, stream: bool) -> None:
    request = Request(text(540, 0), SamplingParams(12, ignore_eos=True))
    engine = engine_of(base_of(family), kind)
    counts, found = zip(*(read(engine, request, stream=stream) for _ in range(3)), strict=True)
    assert counts == (539, 0, 0)
    assert [one.num_cached_tokens for one in found] == [0, 539, 539]
    (alone,) = ask(engine_of(base_of(family), slots=1, kept_rows=0), [request])
    assert tokens_of(found) == [alone.token_ids] * 3
    assert len(engine.scheduler.kept) == 1


def mixed(count: int, seed: int) -> list[Request]:
    """Requests of two salts, with few beginnings on both sides of the 256th token, and repeats."""
    chosen = random.Random(seed)
    beginnings = [text(length, length) for length in (9, 70, 255, 300)]
    made = []
    for row in range(count):
        prompt = [*chosen.choice(beginnings), *text(chosen.choice([0, 1, 20]), chosen.randrange(3))]
        settings = SamplingParams(chosen.randint(1, 20), temperature=row % 2, seed=row, ignore_eos=True)
        made.append(Request(prompt, settings, salt=chosen.choice(["", "one"])))
    return made


@cache
def mixed_alone(family: str) -> tuple[list[Request], list[Generation]]:
    requests = mixed(24, 5)
    return requests, ask(engine_of(base_of(family), slots=1, kept_rows=0), requests)


CASES = pairwise(
    2,
    ["llama", "lfm2", "qwen3_next"],
    ["ctc", "adversarial", "eagle3", "none"],
    ["blocks", "behind", "", "blocks, behind"],
)


@pytest.mark.parametrize(("family", "kind", "way"), CASES)
def test_tokens_are_those_of_rows_alone(monkeypatch: pytest.MonkeyPatch, family: str, kind: str, way: str) -> None:
    """With preemptions and cancelled rows between, little memory, and a host that is a step behind."""
    base, (requests, alone), chosen = base_of(family), mixed_alone(family), random.Random(1)
    if "behind" in way:
        queue_steps(monkeypatch)
    need = base.cache_bytes
    room = need.position * BLOCK * (30 + SPARE) + need.slot * (3 + 2) + need.once
    engine = engine_of(base, kind, 3, kept_rows=2, kv_gib=room / 2**30 if "blocks" in way else None)
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        if chosen.random() < 0.03 and len(engine.scheduler.in_slots) > 1:
            engine._preempt()  # as a step whose memory has run out does
        if chosen.random() < 0.1 and (active := engine.scheduler.active):
            gone = engine.submit(Request(chosen.choice(requests).prompt, SamplingParams(90, ignore_eos=True)))
            active[0].handle.cancel() if active[0].limit == 90 else gone.cancel()
        engine.step()
    assert [handle.result(0).token_ids for handle in handles] == tokens_of(alone)
    assert sum(handle.result(0).num_cached_tokens for handle in handles) > 500


def test_texts_with_few_beginnings_share_most_of_what_can_be_shared() -> None:
    """71 % can be: 16 beginnings are read once each."""
    chosen = random.Random(0)
    prompts = [[*text(500, beginning), *text(30, 100 + row)] for row in range(4) for beginning in range(16)]
    chosen.shuffle(prompts)
    requests = [Request(prompt, SamplingParams(chosen.randint(4, 12), ignore_eos=True)) for prompt in prompts]
    engine = engine_of(base_of("llama"), slots=16, kept_rows=16)
    ask(engine, requests)
    state = engine.state()
    assert state.shared_tokens / (state.shared_tokens + state.prefilled_tokens) >= 0.65


def of_documents(family: str, own: int, chunk: int, slots: int = 6) -> tuple[list[list[int]], int]:
    """Return the tokens of six rows of one long system prompt with `own` tokens each, and how much was copied."""
    beginning = text(600, 1)
    engine = engine_of(base_of(family), slots=slots, kept_rows=0, max_model_len=LONGER)
    engine.scheduler.chunk = chunk
    found = ask(engine, [Request([*beginning, *text(own, 10 + row)], END) for row in range(6)])
    return tokens_of(found), engine.state().shared_tokens


@pytest.mark.parametrize(("own", "chunk"), slow_but_tuples([(900, 512)], [(900, 512), (900, 2048), (3_000, 512)]))
def test_hybrids_copy_most_of_what_softmax_copies_of_a_system_prompt(own: int, chunk: int) -> None:
    """There are as many snapshots as rows, and a prompt of 3,600 tokens passes 14 borders."""
    tokens, copied = of_documents("lfm2", own, chunk)
    assert copied >= 0.8 * of_documents("llama", own, chunk)[1]
    assert tokens == of_documents("lfm2", own, chunk, slots=1)[0]


def test_prompts_copy_what_has_been_read_of_one_that_is_still_being_read() -> None:
    """The second takes the rest of a forward, and has less than half of its prompt in common with the first."""
    assert of_documents("llama", 900, 512)[1] >= 5 * 600


def test_strangers_prompts_take_no_state_that_rows_copy_from() -> None:
    """Nor is a state of one salt another's, though the texts begin alike."""
    beginning, engine = text(600, 1), engine_of(base_of("lfm2"), slots=6, kept_rows=0, max_model_len=LONGER)
    ours = engine.submit(Request([*beginning, 5, 6], SamplingParams(90, ignore_eos=True), salt="one"))
    engine.step()
    strangers = [engine.submit(Request([*beginning, *text(2_900, row)], END, salt="two")) for row in range(3)]
    while not all(one.future.done() for one in strangers):
        engine.step()
    assert [one.result(0).num_cached_tokens for one in strangers] == [0, 512, 512]
    assert not ours.future.done()
    later = engine.submit(Request([*beginning, 7], END, salt="one"))
    finish(engine)
    assert later.result(0).num_cached_tokens == 512


def test_a_row_that_ends_while_a_stranger_is_read_is_not_lost() -> None:
    engine = engine_of(base_of("llama"), slots=2)
    engine.scheduler.chunk = 32
    beginning = text(100, 1)
    engine.submit(Request([*beginning, 5], SamplingParams(3, ignore_eos=True)), stream=True)
    engine.step()
    engine.submit(Request(text(600, 2), END))
    later = engine.submit(Request([*beginning, 6, 7], END))
    finish(engine)
    assert later.result(0).num_cached_tokens == len(beginning)


def test_another_salt_sees_nothing_of_it() -> None:
    """Not by counts, and so not by time: as many tokens are read with what others have left as without."""
    prompt = text(80, 3)
    engine = engine_of(base_of("llama"))
    read(engine, Request(prompt, END, salt="one"))
    for salt, counts in (("two", (79, 0)), ("", (79, 0)), ("one", (0, 79))):
        asked, found = read(engine, Request(prompt, END, salt=salt))
        assert (asked, found.num_cached_tokens) == counts


def test_salts_have_equal_shares_and_many_ends_of_a_beginning_drive_out_no_other() -> None:
    engine = engine_of(base_of("llama"), kept_rows=4)
    ask(engine, [Request(text(20, row), END, salt="one") for row in range(5)])
    for row in range(3):
        read(engine, Request(text(20, 50 + row), END, salt="two"))
    assert sorted(row.key.salt for row in engine.scheduler.kept) == ["one", "one", "two", "two"]
    engine = engine_of(base_of("llama"), kept_rows=2)
    read(engine, Request(text(40, 1), END))
    for end in range(6):
        read(engine, Request([*text(40, 2), end + 5], END))
    assert read(engine, Request(text(40, 1), END))[0] == 0


def test_what_is_in_the_place_of_an_image_counts() -> None:
    ids = text(40, 4)
    prompts = [Prompt(ids, (Span(10, 20, digest),)) for digest in (b"one", b"two", b"one")]
    engine = engine_of(base_of("llama"))
    assert [read(engine, Request(prompt, END))[1].num_cached_tokens for prompt in prompts] == [0, 10, 39]


def test_a_chat_goes_on_where_its_last_turn_ended() -> None:
    engine, chat = engine_of(base_of("llama")), text(30, 6)
    for turn in range(4):
        counted, found = read(engine, Request(chat, END))
        assert counted == (29 if not turn else 1 + 4)  # the last token of an answer was pending
        chat += [*found.token_ids, *text(5, turn)]
    assert len(engine.scheduler.kept) == 1


def test_memory_stays_as_it_is(tiny_base: BaseModel) -> None:
    base, blocks = tiny_base, 12
    gib = base.cache_bytes.position * BLOCK * (blocks + SPARE) / 2**30
    engine = Engine(
        base,
        PlainDecoding(),
        SpellingTokenizer(),
        EngineConfig(max_num_seqs=3, max_model_len=4 * BLOCK, kv_gib=gib, kept_rows=5),
    )
    for row in range(40):
        ask(engine, [Request(text(10 + row, row), SamplingParams(1 + row % 9, ignore_eos=True))])
        assert 0 < len(engine.scheduler.kept) <= 5
    engine.scheduler.kept.clear()
    assert engine.batch.has_room(blocks * BLOCK - engine.drafter.spec.positions, 0)


@pytest.mark.parametrize("change", [{"lenient": [0]}, {"handling": Handling.PLAIN}])
def test_rows_whose_state_is_not_the_models_own_are_not_kept(change: dict[str, object]) -> None:
    engine = engine_of(base_of("llama"))
    engine.submit(Request(text(30, 8), END))
    engine.step()
    vars(engine.scheduler.active[0]).update(change)
    finish(engine)
    assert len(engine.scheduler.kept) == 0
