"""Devices at `jobs.serve` on Ray Serve with two replicas: over its own server, and when one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import psutil
import pytest

from benchmarks.edge.knowing import Knowing
from drafter import SamplingParams, SpeculativeLM
from drafter.edge.client import EdgeLM
from tests.pipeline.serving.conftest import KEY, Endpoint, started
from tests.support.waiting import PATIENCE, wait_until

SESSIONS, TOKENS = 16, 60


@pytest.fixture(scope="module")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    settings = {"drafter": "ngram", "engine.num_draft_tokens": 8, "replicas.min": 2, "edge.sessions": SESSIONS}
    with started(model, tmp_path_factory.mktemp("edge"), (KEY,), settings) as endpoint:
        yield endpoint


def replicas(endpoint: Endpoint) -> list[psutil.Process]:
    """Processes of the engines."""
    return [process for process in endpoint.started() if "Engine" in " ".join(process.cmdline()[:1])]


@pytest.mark.slow
def test_a_replica_is_killed_under_its_sessions(plain: SpeculativeLM, endpoint: Endpoint) -> None:
    """Their devices open them at the other one, with the tokens that they have, and all texts are right."""
    prompts = [plain.encode(f"how many {'apples and pens '[: 3 + row]}") for row in range(SESSIONS)]
    sampling = [
        SamplingParams(TOKENS, temperature=0.8 * (row % 2), seed=row, ignore_eos=True) for row in range(SESSIONS)
    ]
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
def test_the_endpoint_ends_while_a_device_is_connected(plain: SpeculativeLM, endpoint: Endpoint) -> None:
    """The last test of the endpoint: it stops it."""
    stream = EdgeLM(endpoint.address, "none", tokenizer=plain.tokenizer, key=KEY).stream([5, 6], SamplingParams(TOKENS))
    next(iter(stream))
    endpoint.process.send_signal(signal.SIGTERM)
    assert endpoint.process.wait(PATIENCE) == 0
    assert "Traceback" not in endpoint.log.read_text(encoding="utf-8")
    stream.close()
