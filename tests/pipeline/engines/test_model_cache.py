"""Engines on one node share what they download."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
ENGINES = 2
WEIGHTS = "model.safetensors"
LOAD = """
from drafter import SpeculativeLM
SpeculativeLM.from_pretrained("somebody/tiny", "none").close()
"""


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
    """A hub with one model; gives out the weights when all engines have asked for them. Counts what it is asked."""
    asked: Counter[tuple[str, str]] = Counter()
    together = threading.Barrier(ENGINES)

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if self.path.endswith(WEIGHTS):
                together.wait(timeout=PATIENCE)
            self.answer()

        def do_GET(self) -> None:
            self.wfile.write(self.answer())

        def answer(self) -> bytes:
            name = self.path.split("?")[0].rpartition("/")[2]
            asked[self.command, name] += 1
            file = folder / name
            found = "/resolve/" in self.path and file.is_file()
            content = file.read_bytes() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return content

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_engines_that_start_together_download_a_model_once(model: Path, tmp_path: Path) -> None:
    with hub(model) as (address, asked):
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        engines = [
            subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(ENGINES)
        ]
        told = [engine.communicate(timeout=PATIENCE)[1] for engine in engines]
    assert [engine.returncode for engine in engines] == [0] * ENGINES, told
    assert asked["HEAD", WEIGHTS] == ENGINES
    assert asked["GET", WEIGHTS] == 1
