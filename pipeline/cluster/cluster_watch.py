"""Notices that the Ray cluster under a driver is lost: Ray itself leaves the driver waiting for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import ray

from pipeline.command_line import say

_LOOK_SECONDS = 2.0
_SILENT_SECONDS = 45.0
"""Longest time without an answer of the cluster's head node. Ray would abort this process after a minute."""


class ClusterWatch:
    """Ends this process with exit code 1 and a reason once its cluster is lost, from threads of its own.

    Args:
        own_cluster: Whether this process has started the cluster, whose processes then end with it: those of a raylet
            that was killed do not end by themselves everywhere.
    """

    def __init__(self, *, own_cluster: bool) -> None:
        self._own_cluster = own_cluster
        self._here = ray.get_runtime_context().get_node_id()
        self._heard = time.monotonic()
        self._over = threading.Event()
        self._started: set[tuple[int, str]] = set()
        for work in (self._ask, self._look):
            threading.Thread(target=work, name="cluster-watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def end_in(self, seconds: float, reason: str) -> None:
        """End this process with `reason` unless it ends by itself, or is no longer watched, in this time."""

        def wait() -> None:
            if not self._over.wait(seconds):
                self.end(reason)

        threading.Thread(target=wait, name="deadline", daemon=True).start()

    def end(self, reason: str) -> None:
        """End this process now, and the cluster that it has started: Ray's own shutdown may wait for the dead."""
        with suppress(OSError):  # nobody may read it any more
            say(f"error: {reason}")
        self._note_started()
        for pid, begun in tuple(self._started):
            if _begun(pid) == begun:  # or the number is another process's by now
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _ask(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                nodes = ray.nodes()
            except Exception:  # Ray raises bare ones
                continue
            self._heard = time.monotonic()
            if not any(node["Alive"] for node in nodes if node["NodeID"] == self._here):
                self.end("Ray has died on this machine (its raylet), and what ran there with it: start again")

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._note_started()
            if time.monotonic() - self._heard > _SILENT_SECONDS:
                self.end(f"the head node of the Ray cluster has not answered for {_SILENT_SECONDS:g} s: start again")

    def _note_started(self) -> None:
        if self._own_cluster:
            self._started |= {(pid, _begun(pid)) for pid in _descendants(os.getpid())}


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have, on Linux; elsewhere none."""
    found: list[int] = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _begun(pid: int) -> str:
    """Return when a process began, in the kernel's units; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
