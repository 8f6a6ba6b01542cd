"""The endpoint is updated while clients ask: does anybody notice?

    python -m benchmarks.endpoint.live_update

A cluster on this machine runs the endpoint from a file; clients stream answers from it without a pause. Then a changed
file is deployed, by which both ingress and engine are replaced. Every answer must be complete and what it was, whoever
gave it. Exits with 1 where one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from examples.local_cluster import LocalCluster, NodeType
from pipeline.cluster.ray_cluster import LOOPBACK, free_ports

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 120.0
_CHOICES = {"before": 4, "after": 8}
"""What the update changes: how many choices a request may ask for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Update, and say what the clients saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="at a time (default: %(default)s)")
    args = parser.parse_args(arguments)
    cluster = LocalCluster([NodeType(cpus=4)])
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, cluster:
        seen, other = asyncio.run(watch(cluster, Path(folder), port, args.clients))
    print(", ".join(f"{count} answers {what}" for what, count in sorted(seen.items())))
    if other:
        raise SystemExit(f"error: {other} answers were others than before")
    if set(seen) != {"complete"}:
        raise SystemExit("error: clients noticed the update")


async def watch(cluster: LocalCluster, folder: Path, port: int, clients: int) -> tuple[Counter[str], int]:
    """What became of the clients' requests, and how many answers differed from the first to the same question."""
    seen: Counter[str] = Counter()
    answers: dict[int, str] = {}
    other = 0
    async with httpx2.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", timeout=_PATIENCE) as client:
        deploy(cluster, folder, port, "before")
        await until(lambda: allows(client, _CHOICES["before"]))
        done = asyncio.Event()

        async def ask_on(own: int) -> None:
            nonlocal other
            turn = 0
            while not done.is_set():
                question = (own + turn) % 8
                turn += 1
                outcome, text = await ask(client, question)
                seen[outcome] += 1
                if outcome == "complete":
                    other += answers.setdefault(question, text) != text

        asking = [asyncio.create_task(ask_on(own)) for own in range(clients)]
        await asyncio.sleep(5)
        await asyncio.to_thread(deploy, cluster, folder, port, "after")
        begun = time.monotonic()
        await until(lambda: allows(client, _CHOICES["after"]))
        print(f"the update took {time.monotonic() - begun:.0f} seconds")
        await asyncio.sleep(15)  # what was replaced has ended by then, too
        done.set()
        await asyncio.gather(*asking)
    return seen, other


def deploy(cluster: LocalCluster, folder: Path, port: int, state: str) -> None:
    """Have the cluster run what a file for Ray Serve says."""
    file = folder / f"{state}.yaml"  # JSON is YAML
    limits = {"queue": 64, "seconds": 60, "choices": _CHOICES[state]}
    application = {
        "name": "drafter",
        "route_prefix": "/",
        "import_path": "pipeline.serving.application:build",
        "args": {
            "model": None,
            "keys": "none",
            "engine": {"max_num_seqs": 8, "num_draft_tokens": 16},
            "limits": limits,
            "replicas": {"cpus": 0.5},
        },
    }
    config = {"http_options": {"host": LOOPBACK, "port": port}, "applications": [application]}
    file.write_text(json.dumps(config), encoding="utf-8")
    serve = Path(sys.executable).parent / "serve"
    environment = {**cluster.environment, "PYTHONPATH": str(_ROOT)}
    command = [str(serve), "deploy", str(file), "--address", cluster.jobs_address]
    subprocess.run(command, env=environment, check=True, capture_output=True)


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `reached()` is true."""
    deadline = time.monotonic() + _PATIENCE
    while not await reached():
        if time.monotonic() > deadline:
            raise SystemExit("error: the endpoint was not there in time")
        await asyncio.sleep(0.5)


async def allows(client: httpx2.AsyncClient, choices: int) -> bool:
    """Whether there is an endpoint that allows so many choices a request."""
    try:
        response = await client.post("/v1/chat/completions", json=body(0) | {"n": choices, "max_tokens": 1})
    except httpx2.TransportError:
        return False
    return bool(response.status_code == 200)


async def ask(client: httpx2.AsyncClient, question: int) -> tuple[str, str]:
    """What became of a request, and its text."""
    text, last = "", ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body(question) | {"stream": True}) as response:
            if response.status_code != 200:
                return f"with status {response.status_code}", ""
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    text += "".join(
                        one["delta"].get("content") or "" for one in json.loads(line[6:]).get("choices", ())
                    )
    except httpx2.TransportError as error:
        return f"that ended with {type(error).__name__}", text
    return "complete" if last == "data: [DONE]" else "that were cut", text


def body(question: int) -> dict[str, Any]:
    """A request."""
    content = f"Tom has {question + 2} boxes of 12 pens. How many pens has he?"
    return {
        "model": "embedded",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 100,
    }


if __name__ == "__main__":
    main()
