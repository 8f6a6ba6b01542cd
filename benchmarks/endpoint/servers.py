"""Servers to measure, each in a process of its own and alone on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from pipeline.cluster.ray_cluster import LOOPBACK, free_ports

_START_SECONDS = 300.0


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Args:
        address: Of its root.
        model: What it calls the model.
        pid: Of its process, which may have children.
    """

    address: str
    model: str
    pid: int


@contextmanager
def endpoint(model: str | None, drafter: str, settings: Sequence[str] = ()) -> Iterator[Server]:
    """This project's own; `settings` are further ones of `drafter serve`."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "jobs.serve", "--port", str(port), "--name", "model", "--drafter", drafter]
    command += [] if model is None else ["--model", model]
    with _running([*command, *settings], port) as pid:
        yield Server(f"http://{LOOPBACK}:{port}", "model", pid)


@contextmanager
def transformers_serve(model: str, dtype: str) -> Iterator[Server]:
    """`transformers serve` with its continuous batching."""
    (port,) = free_ports(1)
    program = Path(sys.executable).parent / "transformers"
    command = [str(program), "serve", model, "--continuous-batching", "--dtype", dtype, "--port", str(port)]
    with _running([*command, "--host", LOOPBACK], port) as pid:
        yield Server(f"http://{LOOPBACK}:{port}", model, pid)


@contextmanager
def _running(command: list[str], port: int) -> Iterator[int]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: the server does not start: {' '.join(command)}")
            time.sleep(0.5)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _healthy(port: int) -> bool:
    try:
        return httpx2.get(f"http://{LOOPBACK}:{port}/health", timeout=10).status_code == 200
    except httpx2.TransportError:
        return False
