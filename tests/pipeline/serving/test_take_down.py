"""An endpoint that is stopped takes down nothing but itself."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from ray import serve

from drafter import SamplingParams, SpeculativeLM
from drafter.edge.client import EdgeLM
from pipeline.cluster.ray_cluster import free_ports
from pipeline.serving.job import take_down
from tests.pipeline.serving.conftest import KEY, NAME, started
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow  # they start Ray Serve


class Nothing:
    """A deployment that costs nothing."""


@pytest.fixture
def applications(local_ray: None) -> Iterator[None]:
    """Ray Serve with the endpoint's application and another."""
    serve.start(http_options={"port": free_ports(1)[0]}, proxy_location="Disabled")
    for name in ("drafter", "other"):
        deployment = serve.deployment(Nothing, name=name, ray_actor_options={"num_cpus": 0})
        serve.run(deployment.bind(), name=name, route_prefix=f"/{name}", logging_config={"log_level": "ERROR"})
    yield
    serve.shutdown()


def test_other_applications_stay(applications: None) -> None:
    for _ in range(2):  # the second time there is nothing to take down
        take_down(threading.Event())
        running = {name: one.status for name, one in serve.status().applications.items()}
        assert running == {"other": "RUNNING"}


def test_clients_that_do_not_read_are_not_waited_for(plain: SpeculativeLM, model: Path, tmp_path: Path) -> None:
    """Nor are devices that are connected."""
    settings = {"drafter": "none", "limits.receive_seconds": 2 * PATIENCE, "limits.seconds": 2 * PATIENCE}
    settings["edge.sessions"] = 1
    body = json.dumps(
        {
            "model": NAME,
            "prompt": "how many",
            "max_tokens": 200,
            "n": 16,
            "logprobs": 5,
            "stream": True,
            "ignore_eos": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with started(model, tmp_path, (KEY,), settings) as endpoint, ExitStack() as opened:
        device = EdgeLM(endpoint.address, "none", tokenizer=plain.tokenizer, key=KEY)
        stream = device.stream([5, 6], SamplingParams(60))
        next(iter(stream))
        host, port = endpoint.address.removeprefix("http://").split(":")
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall((head + body).encode())

        def nobody_reads() -> bool:
            health = httpx2.get(f"{endpoint.address}/health", timeout=PATIENCE).json()
            return bool(health["connections"]["unread"] == 4)

        wait_until(nobody_reads, "all four answers wait to be read")
        endpoint.process.send_signal(signal.SIGTERM)
        assert endpoint.process.wait(PATIENCE) == 0
        assert "Traceback" not in endpoint.log.read_text(encoding="utf-8")
        stream.close()
