"""A driver whose cluster is lost ends with a reason, and takes what it has started with it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import psutil
import pytest

from pipeline.cluster import cluster_watch
from pipeline.cluster.cluster_watch import ClusterWatch
from tests.support.waiting import PATIENCE, wait_until


@pytest.mark.parametrize(
    ("ends", "own", "said", "why"),
    [
        ("raylet", False, None, "Ray's process on this machine (the raylet) has ended"),
        ("head", True, None, "Ray's head process (the GCS) has ended"),
        ("head", False, "it may come back within 0.05 s", "has not answered for 0.05 s"),
    ],
)
def test_the_end_of_ray_ends_the_driver_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: str,
    own: bool,
    said: str | None,
    why: str,
) -> None:
    servers = {name: socket.create_server(("127.0.0.1", 0)) for name in ("raylet", "head")}
    ports = {name: server.getsockname()[1] for name, server in servers.items()}
    node = {"NodeID": "me", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": ports["raylet"]}
    context = SimpleNamespace(get_node_id=lambda: "me", gcs_address=f"127.0.0.1:{ports['head']}")
    ray = SimpleNamespace(nodes=lambda: [node, {"NodeID": "another"}], get_runtime_context=lambda: context)
    monkeypatch.setattr(cluster_watch, "ray", ray)
    monkeypatch.setattr(cluster_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cluster_watch, "_SILENT_SECONDS", 0.05)
    ended, lines = threading.Event(), list[str]()

    def end(watch: ClusterWatch, line: str) -> None:
        lines.append(line)
        ended.set()

    monkeypatch.setattr(ClusterWatch, "end", end)
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        stack.enter_context(ClusterWatch(own_cluster=own, last_line="the last line: {}".format))
        servers[ends].close()
        assert ended.wait(PATIENCE)
    assert len(lines) == 1
    assert lines[0].startswith("the last line: ")
    assert why in lines[0]
    assert (said or "") in capsys.readouterr().err


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
    assert (ended.returncode, ended.stderr) == (1, "it is over\n")

    def is_gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(int(ended.stdout)).status() == psutil.STATUS_ZOMBIE)
        return True

    wait_until(is_gone, "the child's end")
