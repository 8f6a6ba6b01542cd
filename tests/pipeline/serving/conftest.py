"""One small model, its plain decoding, and servers around it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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

NAME = "tiny"
KEY = "sk-secret-of-the-tests"


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
        served({NAME: Answers(lm, "replica", seconds=240)}) as address,
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
        page = httpx2.get(f"{self.address}/metrics", headers=headers, timeout=30).raise_for_status().text
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self, seconds: float = 30.0) -> dict[str, float]:
        """Wait until no slot is taken and nothing waits; return the figures then."""
        deadline = time.monotonic() + seconds
        while (now := self.figures())["drafter_slots_active"] or now["drafter_requests_waiting"]:
            assert time.monotonic() < deadline, f"slots are still taken: {now}"
            time.sleep(0.1)
        return now


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
        "engine.slots": 4,
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
    try:
        deadline = time.monotonic() + 400
        while "\nserving " not in f"\n{log.read_text(encoding='utf-8')}":
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        yield Endpoint(process, f"http://127.0.0.1:{port}", log, ray_folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(120)
        shutil.rmtree(ray_folder, ignore_errors=True)
