"""A batch on Ray Serve, through kills of a replica, of the ingress and of the whole server."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from openai import APIError

from drafter import SpeculativeLM
from tests.pipeline.serving.conftest import KEY, NAME, Endpoint, started
from tests.pipeline.serving.test_batches import begin, chat, client, ended, lines, results
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow
LINES = 200


def completed(endpoint: Endpoint, batch: str) -> int:
    with suppress(APIError):  # the ingress is being replaced
        counts = client(endpoint.address, KEY).batches.retrieve(batch).request_counts
        return 0 if counts is None else counts.completed
    return 0


def ready(endpoint: Endpoint) -> bool:
    with suppress(APIError):
        return not client(endpoint.address, KEY).batches.list().data
    return False


def kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def test_each_line_is_there_once_whatever_is_killed(model: Path, plain: SpeculativeLM, tmp_path: Path) -> None:
    settings = {
        "drafter": "ngram",
        "engine.num_draft_tokens": 8,
        "replicas.min": 2,
        "batches.folder": tmp_path / "kept",
    }
    bodies = [
        chat(f"how many {row} pens", seed=row, temperature=0.9 * (row % 2), max_tokens=100, logit_bias={"0": -100})
        for row in range(LINES)
    ]
    with started(model, tmp_path, (KEY,), settings) as endpoint:
        endpoint.wait_until_well()
        api = client(endpoint.address, KEY)
        wait_until(lambda: ready(endpoint), "the batches are there")
        batch = begin(api, lines(bodies))
        for share, name in ((0.1, "Engine"), (0.3, "Ingress")):
            wait_until(lambda share=share: completed(endpoint, batch.id) > share * LINES, "lines are answered")  # type: ignore[misc]
            found = [one for one in endpoint.started() if name in " ".join(one.cmdline()[:1])]
            kill(found[:1])
        wait_until(lambda: completed(endpoint, batch.id) > 0.6 * LINES, "lines are answered")
        before = completed(endpoint, batch.id)
        assert before < LINES
        kill([*endpoint.started(), psutil.Process(endpoint.process.pid)])
    with started(model, tmp_path, (KEY,), settings) as endpoint:
        wait_until(lambda: completed(endpoint, batch.id) >= before, "what was kept is there")
        wait_until(lambda: completed(endpoint, batch.id) > 0.7 * LINES, "lines are answered")
        endpoint.process.send_signal(signal.SIGTERM)  # a stop in good order waits for no line
        assert endpoint.process.wait(PATIENCE) == 0
    with started(model, tmp_path, (KEY,), settings) as endpoint:
        api = client(endpoint.address, KEY)
        wait_until(lambda: completed(endpoint, batch.id) > 0, "the endpoint answers")
        done = ended(api, batch)
        assert done.request_counts is not None
        assert vars(done.request_counts) == {"total": LINES, "completed": LINES, "failed": 0}
        answers = results(api, done.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"row {row}" for row in range(LINES)]
    wanted = plain.chat(
        [f"how many {row} pens" for row in range(LINES)],
        [
            {"seed": row, "temperature": 0.9 * (row % 2), "max_new_tokens": 100, "logit_bias": {0: -100}}
            for row in range(LINES)
        ],
    )
    found = [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers]
    assert found == [one.text for one in wanted]
    assert answers[0]["response"]["body"]["model"] == NAME
