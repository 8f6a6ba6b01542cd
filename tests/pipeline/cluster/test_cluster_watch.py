"""A driver whose cluster is lost ends with a reason, and takes what it has started with it."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipeline.cluster import cluster_watch
from pipeline.cluster.cluster_watch import ClusterWatch
from tests.support.waiting import PATIENCE, wait_until


class Ended:
    """What a watch says where it would end this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]] | Exception) -> None:
        self.nodes, self._reasons, self._ended = nodes, list[str](), threading.Event()
        monkeypatch.setattr(cluster_watch, "_LOOK_SECONDS", 0.01)
        monkeypatch.setattr(cluster_watch, "_SILENT_SECONDS", 0.05)
        context = SimpleNamespace(get_node_id=lambda: "here")
        ray = SimpleNamespace(nodes=self._nodes, get_runtime_context=lambda: context)
        monkeypatch.setattr(cluster_watch, "ray", ray)
        monkeypatch.setattr(ClusterWatch, "end", self._end)

    def reason(self) -> str:
        assert self._ended.wait(PATIENCE)
        return self._reasons[0]

    def _nodes(self) -> list[dict[str, Any]]:
        if isinstance(self.nodes, Exception):
            raise self.nodes
        return self.nodes

    def _end(self, reason: str) -> None:
        self._reasons.append(reason)
        self._ended.set()


def node(name: str, *, alive: bool) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive}


def test_a_dead_raylet_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(monkeypatch, [node("here", alive=False), node("other", alive=True)])
    watch = ClusterWatch(own_cluster=False)
    assert "its raylet" in ended.reason()
    watch.close()


def test_a_head_node_that_does_not_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(monkeypatch, RuntimeError("no connection"))
    watch = ClusterWatch(own_cluster=False)
    assert "has not answered" in ended.reason()
    watch.close()


def test_a_process_that_ends_takes_those_with_it_that_it_has_started() -> None:
    code = """
import subprocess, sys, threading
from pipeline.cluster.cluster_watch import ClusterWatch
watch = ClusterWatch.__new__(ClusterWatch)
watch._own_cluster, watch._started, watch._over = True, set(), threading.Event()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
watch.end_in(0, "it is over")
child.wait()
import time; time.sleep(600)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (1, "error: it is over\n")

    def is_gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(int(ended.stdout)).status() == psutil.STATUS_ZOMBIE)
        return True

    wait_until(is_gone, "the child's end")
