"""Devices that draft get the tokens of one process, whatever they draft and whatever becomes of their messages."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from benchmarks.edge.faults import Faults, faulty
from benchmarks.edge.knowing import Knowing
from drafter import EngineConfig, EngineError, Generation, RequestError, SamplingParams, SpeculativeLM
from drafter.edge.client import EdgeLM
from drafter.edge.messages import FROM_SERVER, PATH, Close, Draft, Error, Message, Open, Opened, Verified, read, write
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import vocabulary_digest
from pipeline.serving.config import EdgeConfig
from pipeline.serving.keys import read_keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.calling import with_tools
from tests.support.guides import hold_new
from tests.support.local_endpoint import served
from tests.support.marks import slow_but
from tests.support.waiting import PATIENCE, wait_until

SLOTS = 4
QUICK = {"timeout": 0.3, "give_up": PATIENCE}
"""Of devices whose messages get lost: how long they wait for an answer before they ask again."""


@pytest.fixture(scope="module")
def verifying(model: Path) -> Iterator[SpeculativeLM]:
    """The model with a drafter of its own, which also verifies what devices bring."""
    config = EngineConfig(max_num_seqs=SLOTS, num_draft_tokens=8, max_queue=64)
    with SpeculativeLM.from_pretrained(model, "ngram", config=config, brought=8) as lm:
        yield lm


@pytest.fixture
def replica(verifying: SpeculativeLM) -> Answers:
    return Answers(verifying, "replica", PATIENCE, EdgeConfig(sessions=32, draft_tokens=8))


@pytest.fixture
def address(replica: Answers) -> Iterator[str]:
    with served({NAME: replica}, edge=EdgeConfig(sessions=32, draft_tokens=8)) as address:
        yield address


def cases(plain: SpeculativeLM, count: int, tokens: int = 40) -> list[tuple[list[int], SamplingParams, Generation]]:
    """Prompts, greedy and sampled, and what one process makes of them."""
    found = []
    for case in range(count):
        prompt = plain.encode(f"how many {'apples and pens '[: 3 + case % 12]}")
        sampling = SamplingParams(tokens, temperature=0.9 * (case % 2), seed=case, ignore_eos=case % 3 > 0)
        found.append((prompt, sampling, plain.generate(prompt, sampling)[0]))
    return found


def device(plain: SpeculativeLM, address: str, case: Any, quality: float, **settings: Any) -> EdgeLM:
    prompt, _, expected = case
    drafter = Knowing([*prompt, *expected.token_ids], quality, seed=len(prompt))
    return EdgeLM(address, drafter, tokenizer=plain.tokenizer, **settings)


def idle(replica: Answers, lm: SpeculativeLM) -> bool:
    """No session is left, nor any row."""
    scheduler = lm.engine.scheduler
    return not replica._edge.sessions and not scheduler.in_slots and not scheduler.parked and not scheduler.waiting


# ---- the same tokens


@pytest.mark.parametrize("quality", slow_but([0.7], [0.0, 0.7, 1.0]))
def test_tokens_and_text_are_those_of_one_process(
    plain: SpeculativeLM, verifying: SpeculativeLM, replica: Answers, address: str, quality: float
) -> None:
    """More sessions at a time than slots, and ordinary clients between them."""
    some = cases(plain, 3 * SLOTS)
    body = {"model": NAME, "prompt": some[0][0], "max_tokens": 40, "temperature": 0, "ignore_eos": False}

    def run(case: Any) -> tuple[list[int], str, str]:
        stream = device(plain, address, case, quality).stream(case[0], case[1])
        text = "".join(delta.text for delta in stream)
        result = stream.result()
        assert text == result.text
        return result.token_ids, result.text, result.finish_reason

    with ThreadPoolExecutor(len(some) + 1) as pool:
        other = pool.submit(httpx2.post, f"{address}/v1/completions", json=body, timeout=PATIENCE)
        found = list(pool.map(run, some))
    assert found == [(one.token_ids, one.text, one.finish_reason) for _, _, one in some]
    assert other.result().json()["choices"][0]["text"] == some[0][2].text
    wait_until(lambda: idle(replica, verifying), "all sessions are closed")


def test_good_drafts_are_accepted(plain: SpeculativeLM, address: str) -> None:
    (case,) = cases(plain, 1)
    case = case[0], SamplingParams(40, ignore_eos=True), plain.generate(case[0], SamplingParams(40, ignore_eos=True))[0]
    found = device(plain, address, case, 1.0).generate(case[0], case[1])
    assert found.token_ids == case[2].token_ids
    assert found.counts.num_decode_steps <= 2 + 40 / 8


@pytest.mark.parametrize("drafter", [None, "model"])
def test_real_drafters_and_messages(plain: SpeculativeLM, model: Path, address: str, drafter: str | None) -> None:
    """The default, and the target model itself as the draft model; a chat, of which the server makes the prompt."""
    lm = EdgeLM(address, None if drafter is None else model, tokenizer=str(model))
    for prompt in ([{"role": "user", "content": "how many apples"}], "how many pens"):
        for settings in ({"stop": "e"}, {"temperature": 0.8, "seed": 3, "ignore_eos": True}):
            expected = plain.generate(prompt, max_new_tokens=30, **settings)[0]
            stream = lm.stream(prompt, max_new_tokens=30, **settings)
            assert "".join(delta.text for delta in stream) == expected.text
            assert stream.result().token_ids == expected.token_ids
            if drafter is not None and "seed" not in settings:
                assert stream.counts.num_accepted_draft_tokens > 0


OUTPUTS: list[Any] = [
    {"json": {"properties": {"kind": {"enum": ["apple", "pear"]}, "ripe": {"type": "boolean"}}}},
    {"regex": "[a-f]{3,9} pens"},
    {"choice": ["apples", "apples and pens"]},
    {"json_object": True},
    {"grammar": 'start: "pens" | "pears" start'},
]


@pytest.mark.parametrize("outputs", slow_but(OUTPUTS[:2], OUTPUTS), ids=lambda one: next(iter(one)))
def test_records_are_those_of_one_process(plain: SpeculativeLM, address: str, outputs: Any) -> None:
    """Greedy and sampled, by the default drafter and by one that knows nothing."""
    prompt = plain.encode("how many apples")
    for drafter, temperature in ((None, 0.0), ("none", 0.9)):
        sampling = SamplingParams(40, temperature, seed=3, structured_outputs=outputs)
        expected = plain.generate(prompt, sampling)[0]
        found = EdgeLM(address, drafter, tokenizer=plain.tokenizer).generate(prompt, sampling)
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )


def test_tools_are_those_of_the_endpoint(model: Path, tmp_path: Path) -> None:
    """A call that must be is a call, though its device drafts nothing, and its session is lost half-way."""
    look = {"type": "object", "properties": {"at": {"enum": ["tree", "sky"]}}, "required": ["at"]}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "how many"}], "seed": 0, "max_tokens": 60}
    asked["tools"] = [{"type": "function", "function": {"name": "look", "parameters": look, "strict": True}}]
    asked |= {"tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": False}
    folder, sessions = with_tools(model, tmp_path, tokens=False), EdgeConfig(sessions=2)
    with SpeculativeLM.from_pretrained(folder, "none", brought=8) as lm:
        replica = Answers(lm, "replica", PATIENCE, sessions)
        with served({NAME: replica}, edge=sessions) as address, talk(address) as socket:
            found = ask(socket, Open("0" * 32, vocabulary_digest(lm.tokenizer), asked))
            assert isinstance(found, Opened)
            prompt, output = found.prompt, list(found.tokens)
            while found.finished is None and len(output) < 9:
                found = ask(socket, Draft(len(output), len(output), ()))
                assert isinstance(found, Verified)
                output += found.tokens
            (session,) = replica._edge.sessions.values()
            session.end("ended", "lost")
            assert prompt is not None
            with talk(address) as again:
                opening = Open("0" * 32, vocabulary_digest(lm.tokenizer), asked, tuple(output), prompt=prompt)
                found = ask(again, opening)
                assert isinstance(found, Opened)
                assert found.prompt is None
                output += found.tokens
                while found.finished is None:
                    found = ask(again, Draft(len(output), len(output), ()))
                    assert isinstance(found, Verified)
                    output += found.tokens
    assert re.search(r'"name": ?"look", ?"arguments": ?\{"at": ?"(tree|sky)"\}', lm.tokenizer.decode(output))


def test_a_chat_with_tools_goes_on_as_it_was_when_its_session_is_lost(model: Path, tmp_path: Path) -> None:
    look = {"type": "object", "properties": {"at": {"enum": ["tree", "sky"]}}, "required": ["at"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": look, "strict": True}}]
    chat = Conversation([{"role": "user", "content": "how many"}], tools=tools)
    folder, sessions = with_tools(model, tmp_path, tokens=True, special=True), EdgeConfig(sessions=2, draft_tokens=4)
    with SpeculativeLM.from_pretrained(folder, "none", brought=4) as lm:
        replica, mark = Answers(lm, "replica", PATIENCE, sessions), lm.tokenizer.get_vocab()["<tool_call>"]
        settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5, "logit_bias": {mark: 12}}
        with served({NAME: replica}, edge=sessions) as address:
            device = EdgeLM(address, "none", tokenizer=lm.tokenizer)
            expected = device.generate(chat, **settings)
            stream, text, lost = device.stream(chat, **settings), "", 0
            for delta in stream:
                text += delta.text
                if len(stream.output) >= 6 * (lost + 1) and lost < 3:
                    for session in replica._edge.sessions.values():
                        session.end("ended", "lost")
                    lost += 1
            assert lost
    assert mark in expected.token_ids
    assert (stream.output, text) == (expected.token_ids, expected.text)


def run_through_faults(plain: SpeculativeLM, address: str, count: int, seed: int) -> dict[str, int]:
    some = cases(plain, 8)
    chosen = random.Random(seed)
    with faulty(address, Faults(losses=0.05, cuts=0.03), seed) as (way, proxy), ThreadPoolExecutor(16) as pool:

        def run(number: int) -> bool:
            case = some[number % len(some)]
            lm = device(plain, way, case, chosen.choice([0.0, 0.5, 0.9]), **QUICK)
            return lm.generate(case[0], case[1]).token_ids == case[2].token_ids

        assert all(pool.map(run, range(count)))
    return proxy.counts


def test_faults_change_nothing(plain: SpeculativeLM, replica: Answers, address: str) -> None:
    counts = run_through_faults(plain, address, 16, seed=1)
    assert min(counts.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_more_faults_change_nothing(plain: SpeculativeLM, replica: Answers, address: str, seed: int) -> None:
    run_through_faults(plain, address, 60, seed)


def test_a_device_shows_what_it_expects_and_may_go_on_alone(plain: SpeculativeLM, address: str) -> None:
    (case,) = cases(plain, 1, tokens=90)
    with faulty(address, Faults(0, 0, 0, 0, 0)) as (way, proxy):
        lm = device(plain, way, case, 1.0, timeout=0.2, give_up=PATIENCE, alone=True)
        stream = lm.stream(case[0], case[1])
        shown: list[int] = []
        alone = 0
        for delta in stream:
            shown += delta.token_ids
            right = case[2].token_ids[: len(shown) + len(delta.unconfirmed)]
            assert [*shown, *delta.unconfirmed][: len(right)] == right
            if len(shown) > 5 and not alone:
                proxy.refuses = True
                proxy.loop.call_soon_threadsafe(proxy.cut_all)
            if proxy.refuses and not delta.token_ids:
                alone += 1
                proxy.refuses = alone < 4
        assert alone >= 4
        assert stream.result().token_ids == case[2].token_ids


def test_a_silent_device_is_gone_on_for_if_it_wanted_that(
    plain: SpeculativeLM, verifying: SpeculativeLM, replica: Answers, address: str
) -> None:
    some = cases(plain, 2)
    for (prompt, sampling, expected), patience in zip(some, (0.05, None), strict=True):
        lm = EdgeLM(address, "none", tokenizer=plain.tokenizer, patience=patience)
        stream = lm.stream(prompt, sampling)
        first = next(iter(stream))
        (session,) = replica._edge.sessions.values()
        if patience is not None:
            wait_until(lambda: session._finished, "the server has gone on by itself")  # noqa: B023
        else:
            assert session._finished is None
        rest = [token for delta in stream for token in delta.token_ids]
        assert [*first.token_ids, *rest] == expected.token_ids
        if patience is not None:
            assert stream.counts.num_decode_steps <= 3
        wait_until(lambda: idle(replica, verifying), "the session is closed")


# ---- what a hostile device may try


def opening(plain: SpeculativeLM, prompt: Sequence[int], session: str = "0" * 32, **changes: Any) -> Open:
    request = {"prompt": list(prompt), "seed": 0, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    return Open(session, vocabulary_digest(plain.tokenizer), request, **changes)


def talk(address: str, **settings: Any) -> ClientConnection:
    socket: ClientConnection = connect(address.replace("http", "ws") + PATH, compression=None, **settings)
    return socket


def answer(socket: ClientConnection) -> Message:
    found: Message = read(socket.recv(PATIENCE), FROM_SERVER)
    return found


def ask(socket: ClientConnection, message: Message) -> Message:
    socket.send(write(message))
    return answer(socket)


def test_a_schema_that_takes_its_time_delays_no_other_session(
    plain: SpeculativeLM, verifying: SpeculativeLM, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = hold_new(verifying.engine.guides, monkeypatch)
    (case,) = cases(plain, 1)
    request = {"prompt": case[0], "structured_outputs": {"choice": ["nobody has asked for this"]}}
    with talk(address) as socket:
        socket.send(write(Open("0" * 32, vocabulary_digest(plain.tokenizer), request)))
        assert begun.wait(PATIENCE)
        assert device(plain, address, case, 1.0).generate(case[0], case[1]).token_ids == case[2].token_ids
        may_go_on.set()
        assert isinstance(answer(socket), Opened)


def test_repeated_stale_and_early_drafts(plain: SpeculativeLM, address: str) -> None:
    prompt = plain.encode("how many apples")
    text = plain.generate(prompt, SamplingParams(20, ignore_eos=True))[0].token_ids
    with talk(address) as socket:
        assert ask(socket, opening(plain, prompt)) == Opened(0, (text[0],), 8)
        first = Draft(1, 1, (*text[1:4], 3), (-1, 0, 1, 0))
        verified = ask(socket, first)
        assert verified == Verified(1, 1, 3, tuple(text[1:5]))
        assert ask(socket, first) == verified  # repeated
        assert ask(socket, Draft(2, 3, (3,))) == Verified(2, 3, 0, tuple(text[3:5]))  # stale
        early = ask(socket, Draft(3, 6, (3,)))
        assert early == Error("gap", "the text has 5 output tokens, and the draft continues 6", 3)
        most = ask(socket, Draft(4, 5, (3,) * 9))
        assert most == Error("too_many_tokens", "a draft may have 8 tokens, not 9", 4)
        beyond = ask(socket, Draft(4, 5, (2**30,)))
        assert isinstance(beyond, Error)
        assert beyond.seq == 4
        assert ask(socket, Draft(5, 5, ())) == Verified(5, 5, 0, (text[5],))
    with talk(address) as socket:  # it goes on, and the device has lost an answer
        assert ask(socket, opening(plain, prompt, output=tuple(text[:4]))) == Opened(4, tuple(text[4:6]), 8)
        socket.send(write(Close()))
    with talk(address) as socket:  # another one, whose device has tokens from elsewhere
        assert ask(socket, opening(plain, prompt, output=tuple(text[:12]))) == Opened(12, (text[12],), 8)
        socket.send(write(Close()))
    with talk(address) as socket:
        wrong = ask(socket, opening(plain, prompt, output=(*text[:4], 3, *text[5:9])))
        assert wrong == Error("text", "the device's text is not the model's: open another session")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"prompt": [5], "seed": 1, "logprobs": 1}, "A session is one text"),
        ({"prompt": [5], "n": 2}, "A session is one text"),
        ({"prompt": [5], "prompt_logprobs": 1}, "A session is one text"),
        ({"prompt": [5], "return_token_ids": True}, "A session is one text"),
        ({"prompt": [5], "stream": True}, "A session is one text"),
        ({"prompt": [5, 10**6]}, "the prompt has token ids outside the vocabulary"),
        ({"prompt": []}, "'prompt'"),
        ({"prompt": [5], "sing": True}, "Unknown parameter: 'sing'"),
        ({"messages": [{"role": "forbidden", "content": "a"}]}, "role"),
        ({"prompt": [5], "model": "other"}, "The model 'other' does not exist: this endpoint has "),
    ],
)
def test_requests_are_checked_as_elsewhere(
    plain: SpeculativeLM, verifying: SpeculativeLM, replica: Answers, address: str, request_: Any, says: str
) -> None:
    with talk(address) as socket:
        found = ask(socket, Open("1" * 32, vocabulary_digest(plain.tokenizer), request_))
    assert isinstance(found, Error)
    assert says in found.message
    wait_until(lambda: idle(replica, verifying), "nothing is kept")


def test_another_tokeniser_is_refused(plain: SpeculativeLM, address: str) -> None:
    with talk(address) as socket:
        found = ask(socket, Open("1" * 32, "other", {"prompt": [5]}))
    assert found == Error("tokenizer", "the device's tokeniser is not the model's: use the model's own")
    lm = EdgeLM(address, "none", tokenizer=plain.tokenizer)
    lm.digest = "other"
    with pytest.raises(RequestError, match="the device's tokeniser is not the model's"):
        lm.generate([5, 6])
    with pytest.raises(RequestError, match="half a character"):
        lm.generate("\ud83d")


def test_keys(plain: SpeculativeLM, verifying: SpeculativeLM, tmp_path: Path) -> None:
    """Without one nothing is opened, and one key's session is nothing to another's."""
    file = tmp_path / "keys"
    file.write_text("one\nother\n", encoding="utf-8")
    edge = EdgeConfig(sessions=2, draft_tokens=8)
    replica, prompt = Answers(verifying, "replica", PATIENCE, edge), plain.encode("how many apples")
    text = plain.generate(prompt, SamplingParams(20, ignore_eos=True))[0].token_ids
    with served({NAME: replica}, read_keys(str(file), "required"), edge=edge) as address, ExitStack() as stack:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                talk(address, additional_headers=headers)
            assert refused.value.response.status_code == 401
        with pytest.raises(RequestError, match="There is no such API key"):
            EdgeLM(address, "none", tokenizer=plain.tokenizer, key="wrong").generate(prompt)
        one, other = (
            stack.enter_context(talk(address, additional_headers={"Authorization": f"Bearer {key}"}))
            for key in ("one", "other")
        )
        assert ask(one, opening(plain, prompt)) == Opened(0, (text[0],), 8)
        assert ask(one, Draft(1, 1, tuple(text[1:4]))) == Verified(1, 1, 3, tuple(text[1:5]))
        assert ask(other, opening(plain, prompt)) == Opened(0, (text[0],), 8)  # the same name, and a session of its own
        # Sessions a key: those that are connected stay, and the next one is refused.
        for name in "ab":
            third = stack.enter_context(talk(address, additional_headers={"Authorization": "Bearer one"}))
            found = ask(third, opening(plain, prompt, name * 32))
            assert isinstance(found, Opened if name == "a" else Error)
        assert found == Error("too_many_sessions", "a key may have 2 sessions: close one")
    wait_until(lambda: idle(replica, verifying), "all sessions have ended with the endpoint")


def test_no_route_unless_it_is_set(local: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        talk(local)
    assert refused.value.response.status_code == 404
    assert not EdgeConfig().sessions


def test_web_pages_and_ordinary_requests_are_refused(address: str) -> None:
    for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 421)):
        with pytest.raises(InvalidStatus) as refused:
            talk(address, additional_headers=headers)
        assert refused.value.response.status_code == status
    assert httpx2.get(address + PATH).status_code == 426


@pytest.mark.parametrize("count", [80, pytest.param(1_000, marks=pytest.mark.slow)])
def test_abandoned_sessions_make_room_and_are_freed(
    plain: SpeculativeLM, verifying: SpeculativeLM, replica: Answers, address: str, count: int
) -> None:
    """Their devices leave without a word. None of their rows outlives the limit of sessions, nor the idle time."""
    prompt = plain.encode("how many")
    for number in range(count):
        with talk(address) as socket:
            assert isinstance(ask(socket, opening(plain, prompt, f"{number:032x}")), Opened)
        assert len(replica._edge.sessions) < 40
    scheduler = verifying.engine.scheduler
    wait_until(lambda: len(replica._edge.sessions) <= 32, "the oldest have made room")
    assert len(scheduler.parked) + len(scheduler.in_slots) + len(scheduler.waiting) < 40
    for session in list(replica._edge.sessions.values()):
        session._idle.cancel()
        session.end("idle", "no message came for too long")
    wait_until(lambda: idle(replica, verifying), "they are freed")


def test_fuzzed_bytes_harm_nobody(
    plain: SpeculativeLM, verifying: SpeculativeLM, replica: Answers, address: str
) -> None:
    chosen, prompt = random.Random(3), plain.encode("how many apples")
    good = [write(opening(plain, prompt)), write(Draft(1, 1, (5, 6), (-1, 0))), write(Close())]
    (case,) = cases(plain, 1)
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            with talk(address) as socket:
                if chosen.random() < 0.5:
                    socket.send(good[0])
                for _ in range(4):
                    text = bytearray(chosen.choice(good).encode())
                    for _ in range(chosen.randrange(4)):
                        text[chosen.randrange(len(text))] = chosen.randrange(256)
                    try:
                        socket.send(bytes(text) if chosen.random() < 0.3 else text.decode("latin-1"))
                        socket.recv(0.05)
                    except Exception:  # of any kind: it is hostile, and was cut off
                        break

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for _ in range(5):
            found = device(plain, address, case, 0.8).generate(case[0], case[1])
            assert found.token_ids == case[2].token_ids
    finally:
        over.set()
        thread.join()
    for session in list(replica._edge.sessions.values()):
        session.end("idle", "no message came for too long")
    wait_until(lambda: idle(replica, verifying), "no slot is kept")


def test_metrics(plain: SpeculativeLM, replica: Answers, address: str) -> None:
    (case,) = cases(plain, 1)
    device(plain, address, case, 1.0).generate(case[0], case[1])
    families = {family.name: family for family in replica.snapshot().families}
    assert families["drafter_edge_opened"].samples[0].value == 1
    for name in ("draft_tokens", "accepted_tokens", "waiting_seconds", "away_seconds"):
        assert next(one.value for one in families[f"drafter_edge_{name}"].samples if one.name.endswith("_count")) > 0
    assert families["drafter_edge_sessions"].samples[0].value <= 1


def test_a_server_that_is_away_is_an_error() -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __len__(self) -> int:
            return 1

    lm = EdgeLM("http://127.0.0.1:9", "none", tokenizer=Words(), give_up=0.0)
    with pytest.raises(EngineError, match=r"the server at http://127\.0\.0\.1:9 cannot go on with the text: "):
        lm.stream([1]).result()
