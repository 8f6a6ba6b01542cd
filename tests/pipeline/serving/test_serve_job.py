"""The endpoint on Ray Serve, over a real socket: what only the whole can show."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx2
import psutil
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, OpenAI

from benchmarks.edge.knowing import Knowing
from drafter import SamplingParams, SpeculativeLM
from drafter.edge.client import EdgeLM
from tests.pipeline.serving.conftest import KEY, NAME, SESSIONS, Endpoint
from tests.support.waiting import PATIENCE, wait_until

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "how many"}],
    "max_tokens": 200,
    "logit_bias": {"0": -100},  # the end-of-sequence token: the answer is as long as it may be
}


def client(endpoint: Endpoint, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{endpoint.address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def async_client(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{endpoint.address}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)


def test_keys(endpoint: Endpoint) -> None:
    assert [one.id for one in client(endpoint).models.list()] == [NAME]
    with pytest.raises(AuthenticationError):
        client(endpoint, "sk-wrong-key").models.list()
    assert httpx2.post(endpoint.address + CHAT, json=LONG, timeout=PATIENCE).status_code == 401
    endpoint.wait_until_well()


def test_a_mixed_load_changes_no_answer(endpoint: Endpoint, plain: SpeculativeLM) -> None:
    rng = random.Random(1)
    cases = [
        (f"how many {rng.choice(['apples', 'pens'])}", rng.choice([0.0, 0.9]), rng.randrange(99), rng.randrange(5, 40))
        for _ in range(16)
    ]
    wanted = [
        plain.generate(
            [{"role": "user", "content": question}],
            SamplingParams(temperature=temperature, seed=seed, max_new_tokens=tokens),
        )[0].text
        for question, temperature, seed, tokens in cases
    ]

    async def ask(api: AsyncOpenAI, question: str, temperature: float, seed: int, tokens: int) -> str:
        settings: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": tokens, "model": NAME}
        messages: Any = [{"role": "user", "content": question}]
        if tokens % 2:
            answer = await api.chat.completions.create(messages=messages, **settings)
            return answer.choices[0].message.content or ""
        chunks = await api.chat.completions.create(messages=messages, stream=True, **settings)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask_all() -> list[str]:
        async with async_client(endpoint) as api:
            return await asyncio.gather(*(ask(api, *case) for case in cases))

    assert asyncio.run(ask_all()) == wanted


@pytest.mark.slow
def test_an_answer_may_be_long(endpoint: Endpoint) -> None:
    """Longer than a message of Ray Serve's, which is 4 MiB."""
    asked = LONG | {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 240}
    answer = client(endpoint).chat.completions.with_raw_response.create(**asked)
    assert len(answer.content) > 4 << 20
    lengths = [len(choice.logprobs.content or []) for choice in answer.parse().choices if choice.logprobs]
    assert lengths == [240] * 16


def test_clients_that_leave_free_their_slots(endpoint: Endpoint) -> None:
    """Streamed and not, while they wait and while they are answered."""
    endpoint.wait_until_idle()

    async def leave(api: httpx2.AsyncClient, place: int) -> None:
        rng = random.Random(place)
        await asyncio.sleep(rng.random())
        body = LONG | {"stream": place % 2 == 0, "n": 1 + place % 3}
        try:
            async with asyncio.timeout(0.02 + rng.random() * 0.4):
                async with api.stream("POST", endpoint.address + CHAT, json=body) as response:
                    async for _ in response.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async def leave_all() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(timeout=PATIENCE, headers=headers) as api:
            await asyncio.gather(*(leave(api, place) for place in range(30)))

    asyncio.run(leave_all())
    endpoint.wait_until_idle()
    answer = client(endpoint).chat.completions.create(**LONG | {"max_tokens": 5})
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_nobody_works_for_a_client_that_has_left(endpoint: Endpoint, stream: bool) -> None:
    """Answers of several clients that leave together are not finished: fewer tokens are made than they asked for."""
    patience = 0.1  # of the clients, in seconds

    async def leave(api: httpx2.AsyncClient) -> None:
        body = LONG | {"stream": stream, "n": 3}
        with suppress(TimeoutError):
            async with asyncio.timeout(patience), api.stream("POST", endpoint.address + CHAT, json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

    async def leave_together() -> None:
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE) as api:
            await asyncio.gather(*(leave(api) for _ in range(5)))

    def work_is_left_undone() -> bool:
        """Whether they left in time: before the answers were finished, but not before anybody worked for them."""
        nonlocal patience
        before = endpoint.wait_until_idle()
        asyncio.run(leave_together())
        made = endpoint.wait_until_idle()["drafter_tokens_total"] - before["drafter_tokens_total"]
        patience *= 1.5 if made == 0 else 0.8
        return bool(0 < made < 5 * 3 * LONG["max_tokens"] / 2)

    wait_until(work_is_left_undone, "answers that nobody reads are given up")


def test_too_many_at_once_are_told_to_come_again(endpoint: Endpoint) -> None:
    endpoint.wait_until_idle()

    async def ask(api: AsyncOpenAI) -> tuple[int, str | None, str | None]:
        try:
            await api.chat.completions.create(**LONG | {"max_tokens": 60})
        except APIStatusError as error:
            return error.status_code, error.code, error.response.headers.get("retry-after")
        return 200, None, None

    async def ask_until_refused() -> set[tuple[int, str | None, str | None]]:
        async with async_client(endpoint) as api:
            asked: list[asyncio.Task[tuple[int, str | None, str | None]]] = []
            while not any(one.done() and one.result()[0] != 200 for one in asked):
                asked += [asyncio.create_task(ask(api)) for _ in range(40)]
                await asyncio.wait(asked, timeout=1, return_when=asyncio.FIRST_COMPLETED)
            return set(await asyncio.gather(*asked))

    assert asyncio.run(ask_until_refused()) == {(200, None, None), (429, "rate_limit_exceeded", "1")}
    endpoint.wait_until_idle()


def test_nothing_listens_to_strangers(endpoint: Endpoint) -> None:
    """Ray's own ports are its cluster's alone, as is its token."""
    addresses = set()
    for process in [psutil.Process(endpoint.process.pid), *endpoint.started()]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            addresses |= {one.laddr.ip.removeprefix("::ffff:") for one in listening}
    assert addresses == {"127.0.0.1"}
    token = Path.home() / ".ray" / "auth_token"
    assert not (token.exists() and token.stat().st_mode & 0o077)


def replicas(endpoint: Endpoint) -> list[psutil.Process]:
    """Processes of the engines."""
    return [process for process in endpoint.started() if "Engine" in " ".join(process.cmdline()[:1])]


@pytest.mark.slow
def test_a_replica_that_dies_takes_only_its_own_streams(endpoint: Endpoint) -> None:
    endpoint.wait_until_idle()
    [victim, _] = replicas(endpoint)

    async def read(api: AsyncOpenAI, begun: asyncio.Semaphore) -> str:
        # Twice as many answers as there are slots, of tokens that no n-gram foresees and that cost time: none of the
        # replicas is done when it is killed.
        slow = {"n": 2, "temperature": 1.5, "logprobs": True, "top_logprobs": 20}
        chunks = await api.chat.completions.create(**LONG | slow, stream=True)
        last = "cut off"
        try:
            async for chunk in chunks:
                if last == "cut off":
                    begun.release()  # before that, another replica would answer in place of the one that dies
                    last = "begun"
                last = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), last)
        except APIError as error:
            last = error.message
        return last

    async def read_all() -> list[str]:
        async with async_client(endpoint) as api:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(read(api, begun)) for _ in range(8)]
            for _ in range(4):  # as many as have slots: those of both replicas
                await begun.acquire()
            os.kill(victim.pid, signal.SIGKILL)
            later = await api.chat.completions.create(**LONG | {"max_tokens": 5})
            assert later.choices[0].finish_reason == "length"
            return await asyncio.gather(*streams)

    ends = asyncio.run(read_all())
    assert set(ends) == {"length", "The model failed while it answered: try again."}
    endpoint.wait_until_well()


@pytest.mark.slow
def test_devices_go_on_at_another_replica_when_theirs_dies(endpoint: Endpoint, plain: SpeculativeLM) -> None:
    """They open their sessions there, with the tokens that they have, and all texts are right."""
    endpoint.wait_until_idle()
    prompts = [plain.encode(f"how many {'apples and pens '[: 3 + row]}") for row in range(SESSIONS)]
    sampling = [SamplingParams(60, temperature=0.8 * (row % 2), seed=row, ignore_eos=True) for row in range(SESSIONS)]
    expected = plain.generate(prompts, sampling)
    begun, killed = Semaphore(0), Semaphore(0)

    def run(row: int) -> list[int]:
        drafter = Knowing([*prompts[row], *expected[row].token_ids], 0.6, seed=row)
        lm = EdgeLM(endpoint.address, drafter, tokenizer=plain.tokenizer, key=KEY, give_up=PATIENCE)
        stream = lm.stream(prompts[row], sampling[row])
        for delta in stream:
            if delta.token_ids:
                break
        begun.release()
        killed.acquire()
        return stream.result().token_ids

    with ThreadPoolExecutor(SESSIONS) as pool:
        texts = pool.map(run, range(SESSIONS))
        for _ in range(SESSIONS):
            begun.acquire()
        assert endpoint.figures()["drafter_edge_sessions"] == SESSIONS
        os.kill(replicas(endpoint)[0].pid, signal.SIGKILL)
        for _ in range(SESSIONS):
            killed.release()
        assert list(texts) == [one.token_ids for one in expected]
    wait_until(lambda: endpoint.wait_until_idle()["drafter_edge_sessions"] == 0, "all sessions are closed")


@pytest.mark.slow
def test_an_ingress_that_dies_is_replaced_at_its_port(endpoint: Endpoint) -> None:
    endpoint.wait_until_idle()
    address = ("127.0.0.1", int(endpoint.address.rsplit(":", 1)[1]))
    # The kernel remembers connections that were open when a listener died.
    with socket.create_connection(address), socket.create_connection(address):
        (listener,) = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == address[1]
        }
        os.kill(listener, signal.SIGKILL)
        time.sleep(1)
    endpoint.wait_until_well()
    assert client(endpoint).chat.completions.create(**LONG | {"max_tokens": 5}).usage.completion_tokens == 5


def test_the_server_ends_in_good_order_and_has_logged_no_key(endpoint: Endpoint) -> None:
    """The last test of the endpoint: it stops it."""
    children = endpoint.started()
    endpoint.process.send_signal(signal.SIGTERM)
    assert endpoint.process.wait(PATIENCE) == 0
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive
    log = endpoint.log.read_text(encoding="utf-8")
    assert "Traceback" not in log
    stopping = "stopping: open requests may end; a second signal ends them\n"
    assert stopping in log
    # Ray's lines may be about a machine that is busy, and come late about the processes that earlier tests killed.
    own = [line for line in log.partition(stopping)[2].splitlines() if not re.match(r"WARNING|\S*\(raylet\)", line)]
    assert own == []
    assert any(endpoint.session.rglob("replica_*.log"))
    for folder in (endpoint.log.parent, endpoint.session):
        found = subprocess.run(["grep", "-rlE", f"{KEY}|sk-wrong-key", folder], capture_output=True, text=True)
        assert [Path(file).name for file in found.stdout.split()] in ([], ["keys.txt"])
