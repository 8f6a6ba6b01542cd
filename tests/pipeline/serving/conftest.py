"""One small model, its plain decoding, and servers around it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from drafter import EngineConfig, SpeculativeLM
from pipeline.cluster.ports import free_ports
from pipeline.serving.replica.answers import Answers
from tests.pipeline.conftest import model as model  # the jobs' tests have one with a chat template
from tests.support.local_endpoint import served
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until

NAME = "tiny"
KEY = "sk-secret-of-the-tests"
SLOTS = 4
"""Of each of the endpoint's two replicas."""


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[SpeculativeLM]:
    """The model without a drafter: what every answer must equal."""
    with SpeculativeLM.from_pretrained(model, "none", config=EngineConfig(slots=4)) as lm:
        yield lm


@pytest.fixture(scope="session")
def local(model: Path) -> Iterator[str]:
    """Address of a server in this process, with a drafter."""
    with (
        SpeculativeLM.from_pretrained(model, "ngram", config=EngineConfig(slots=4, nodes=8)) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        yield address


@dataclass
class Endpoint:
    """`jobs.serve` in a process of its own.

    Args:
        process: It.
        address: Where it listens.
        log: What it has printed.
        session: Folder of Ray's logs.
    """

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    session: Path

    def figures(self) -> dict[str, float]:
        """Sums of its metrics over replicas."""
        headers = {"Authorization": f"Bearer {KEY}"}
        page = httpx2.get(f"{self.address}/metrics", headers=headers, timeout=PATIENCE).raise_for_status().text
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until both replicas answer, no slot is taken and nothing waits; return the figures then."""

        def idle_figures() -> dict[str, float] | None:
            now = self.figures()  # on a busy machine a replica may be too late for a page
            taken = now.get("drafter_slots_active", 0) + now.get("drafter_requests_waiting", 0)
            return now if now.get("drafter_slots") == 2 * SLOTS and not taken else None

        return wait_until(idle_figures, "both replicas are idle")

    def wait_until_well(self) -> None:
        """Wait until both replicas answer."""
        well = {"status": "ok", "replicas": {NAME: 2}}

        def is_well() -> bool:
            with suppress(httpx2.TransportError):
                return bool(httpx2.get(f"{self.address}/health", timeout=PATIENCE).json() == well)
            return False

        wait_until(is_well, "both replicas answer", pause=0.2)


@pytest.fixture(scope="session")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The endpoint on Ray Serve with two replicas, which asks for a key."""
    folder = tmp_path_factory.mktemp("endpoint")
    keys, log, ray_folder = folder / "keys.txt", folder / "log", Path("/tmp") / f"ray-{os.getpid()}"
    keys.write_text(f"# of the tests\n{KEY}\n", encoding="utf-8")
    (port,) = free_ports(1)
    settings = {
        "model": model,
        "name": NAME,
        "drafter": "ngram",
        "port": port,
        "keys_file": keys,
        "engine.slots": SLOTS,
        "engine.nodes": 8,
        "limits.queue": 16,
        "replicas.min": 2,
        "replicas.cpus": 0.5,
    }
    command = [sys.executable, "-m", "jobs.serve"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": str(ray_folder), "RAY_worker_niceness": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def serving() -> bool:
        printed = log.read_text(encoding="utf-8")
        assert process.poll() is None, printed
        return "\nserving " in f"\n{printed}"

    try:
        wait_until(serving, "the endpoint")
        yield Endpoint(process, f"http://127.0.0.1:{port}", log, ray_folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        shutil.rmtree(ray_folder, ignore_errors=True)
