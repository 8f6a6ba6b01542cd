"""Notices that the Ray cluster under a driver is lost: Ray itself ends it without a word, or leaves it waiting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import ray

from pipeline.cluster.ray_cluster import listens
from pipeline.command_line import say

_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 45.0
"""Longest time without an answer of a joined cluster's head. Ray would abort this process after a minute."""


class ClusterWatch:
    """Ends this process with exit code 1 and a reason once its cluster is lost, from a thread of its own.

    Nothing is left in good order, as that would ask Ray for something.

    Args:
        own_cluster: Whether this process has started the cluster, whose processes then end with it: those of a raylet
            that was killed do not end by themselves everywhere. The head of another one may come back.
        last_line: Returns the line to print for a reason, and notes that where it must be noted.
    """

    def __init__(self, *, own_cluster: bool, last_line: Callable[[str], str]) -> None:
        self._own_cluster, self._last_line = own_cluster, last_line
        context = ray.get_runtime_context()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._raylet, self._head = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", context.gcs_address
        self._over = threading.Event()
        self._started: set[tuple[int, str]] = set()
        threading.Thread(target=self._look, name="cluster-watch", daemon=True).start()

    def __enter__(self) -> ClusterWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def end_in(self, seconds: float, line: str) -> None:
        """End this process with `line` unless it ends by itself, or is no longer watched, in this time."""

        def wait() -> None:
            if not self._over.wait(seconds):
                self.end(line)

        threading.Thread(target=wait, name="deadline", daemon=True).start()

    def end(self, line: str) -> None:
        """End this process now, and the cluster that it has started: Ray's own shutdown may wait for the dead."""
        with suppress(OSError):  # nobody may read it any more
            say(line)
        self._note_started()
        for pid, begun in tuple(self._started):
            if _begun(pid) == begun:  # or the number is another process's by now
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _look(self) -> None:
        heard, told, why = time.monotonic(), False, ""
        while not why and not self._over.wait(_LOOK_SECONDS):
            self._note_started()
            answer = listens(self._head)
            if listens(self._raylet) is False:
                why = "Ray's process on this machine (the raylet) has ended"
            elif answer:
                heard, told = time.monotonic(), False
            elif answer is False and self._own_cluster:
                why = "Ray's head process (the GCS) has ended"
            elif time.monotonic() - heard > _SILENT_SECONDS:
                why = f"Ray's head at {self._head} has not answered for {_SILENT_SECONDS:g} s"
            elif not told:
                told = True
                say(f"Ray's head at {self._head} does not answer: it may come back within {_SILENT_SECONDS:g} s")
        if not self._over.is_set():
            self.end(self._last_line(why))

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
