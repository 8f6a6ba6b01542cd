"""A measured process, as the measurement sees it. It only runs while it is asked for something."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import PeerError
from benchmarks.peers.workers.protocol import Done, Settings, Work

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 3600.0
"""Seconds for an answer. A start may export a model, and compile it."""


class WorkerProcess:
    """An engine in a process of its own.

    Between its turns it is stopped, because idle threads of many engines spin for their next work.

    Args:
        python: Interpreter of its environment.
        module: The worker.
        settings: What the worker is started with.
        patience: Seconds to wait for an answer.

    Attributes:
        versions: Versions of the packages that matter.

    Raises:
        PeerError: It does not start.
    """

    def __init__(self, python: Path, module: str, settings: Settings, patience: float = _PATIENCE) -> None:
        self._patience, self._rest = patience, b""
        self._chatter = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [str(python), "-m", module, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._chatter,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            # With its children it is stopped and ended. In this session the system ends what is left of it, too.
            process_group=0,
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def decode(self, work: Work) -> Done:
        """Let the engine decode.

        Raises:
            PeerError: It failed, ended, or gave no answer in time.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(asdict(work)).encode() + b"\n")
            self._process.stdin.flush()
            return Done(**self._answer())
        except BrokenPipeError as error:
            raise PeerError(self._end()) from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process. It may be called again."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._chatter):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what it was asked for last has not been written
                continue

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self) -> bytes:
        """Return the next line. Lines are as long as a pipe holds many times, so they are read in parts."""
        assert self._process.stdout is not None
        stream, parts, deadline = self._process.stdout.fileno(), [self._rest], time.monotonic() + self._patience
        while b"\n" not in parts[-1]:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerError(f"no answer within {self._patience:.0f} seconds")
            part = os.read(stream, 1 << 16)
            if not part:
                raise PeerError(self._end())
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _end(self) -> str:
        """Return how the process ended, with its last words."""
        code = self._process.wait()
        self._chatter.seek(0)
        words = [line for line in self._chatter.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"it ended with {how}: {words[-1] if words else 'without a word'}"
