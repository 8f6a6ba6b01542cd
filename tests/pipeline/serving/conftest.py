"""One small model, its plain decoding, and servers around it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from drafter import EngineConfig, SpeculativeLM
from pipeline.cluster.ray_cluster import free_ports
from pipeline.serving.replica import Answers
from tests.support.local_endpoint import served
from tests.support.paths import ROOT
from tests.support.prepared_workers import PreparedWorkers, prepared_workers
from tests.support.waiting import PATIENCE, wait_until

NAME = "tiny"
KEY = "sk-secret-of-the-tests"
SLOTS = 4
"""Of each of the endpoint's two replicas."""
SESSIONS = 16
"""That the endpoint's devices may have."""


@pytest.fixture(scope="session")
def local(model: Path) -> Iterator[str]:
    """Address of a server in this process, with a drafter."""
    with (
        SpeculativeLM.from_pretrained(model, "ngram", config=EngineConfig(max_num_seqs=4, num_draft_tokens=8)) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        yield address


@dataclass
class Endpoint:
    """`jobs.serve` in a process of its own.

    Args:
        process: It.
        workers: How its workers are forked.
        address: Where it listens.
        log: What it has printed.
        session: Folder of Ray's logs.
    """

    process: subprocess.Popen[bytes]
    workers: PreparedWorkers
    address: str
    log: Path
    session: Path

    def started(self) -> list[psutil.Process]:
        """All processes that it has started."""
        return [*psutil.Process(self.process.pid).children(recursive=True), *self.workers.processes()]

    def figures(self) -> dict[str, float]:
        """Sums of its metrics over replicas."""
        headers = {"Authorization": f"Bearer {KEY}"}
        page = httpx2.get(f"{self.address}/metrics", headers=headers, timeout=PATIENCE).raise_for_status().text
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self, replicas: int = 2) -> dict[str, float]:
        """Wait until all replicas answer, no slot is taken and nothing waits; return the figures then."""

        def idle_figures() -> dict[str, float] | None:
            now = self.figures()  # on a busy machine a replica may be too late for a page
            taken = now.get("drafter_slots_active", 0) + now.get("drafter_requests_waiting", 0)
            return now if now.get("drafter_slots") == replicas * SLOTS and not taken else None

        return wait_until(idle_figures, "the replicas are idle")

    def wait_until_well(self) -> None:
        """Wait until both replicas answer."""

        def is_well() -> bool:
            with suppress(httpx2.TransportError):
                return bool(httpx2.get(f"{self.address}/health", timeout=PATIENCE).json().get("replicas") == {NAME: 2})
            return False

        wait_until(is_well, "both replicas answer", pause=0.2)


@pytest.fixture(scope="module")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The endpoint on Ray Serve with two replicas, which asks for a key and takes devices."""
    settings = {"drafter": "ngram", "engine.num_draft_tokens": 8, "limits.queue": 16, "replicas.min": 2}
    settings["edge.sessions"] = SESSIONS
    with started(model, tmp_path_factory.mktemp("endpoint"), (KEY,), settings) as endpoint:
        yield endpoint


@contextmanager
def started(
    model: Path, folder: Path, keys: Sequence[str], settings: Mapping[str, Any], program: str = "jobs.serve"
) -> Iterator[Endpoint]:
    """`jobs.serve` with half a core for each replica, from when it answers until it has ended.

    Args:
        model: The model.
        folder: For its files, of which it may have some already.
        keys: Who may ask.
        settings: Further ones.
        program: The module that is run.
    """
    (port,) = free_ports(1)
    file, log, ray_folder = folder / "keys.txt", folder / "log", Path("/tmp") / f"ray-{os.getpid()}-{port}"
    file.write_text("\n".join(["# of the tests", *(f"{key} operator" for key in keys), ""]), encoding="utf-8")
    given = {
        "model": model,
        "name": NAME,
        "port": port,
        "keys_file": file,
        "engine.max_num_seqs": SLOTS,
        "replicas.cpus": 0.5,
    }
    command = [sys.executable, "-m", program]
    for name, value in {**given, **settings}.items():
        command += [f"--{name}", str(value)]
    own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(ray_folder), "RAY_worker_niceness": "0"}
    with prepared_workers() as workers:
        environment = {**os.environ, **own, **workers.environment}
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

        def serving() -> bool:
            printed = log.read_text(encoding="utf-8")
            assert process.poll() is None, printed
            return "\nserving " in f"\n{printed}"

        try:
            wait_until(serving, "the endpoint")
            yield Endpoint(process, workers, f"http://127.0.0.1:{port}", log, ray_folder)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
            shutil.rmtree(ray_folder, ignore_errors=True)
