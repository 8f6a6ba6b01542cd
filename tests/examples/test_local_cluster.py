"""What is left of a local cluster whose starter was killed is ended by its name, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples import local_cluster
from examples.local_cluster import end_cluster
from tests.support.waiting import wait_until


def process_of(name: str) -> subprocess.Popen[bytes]:
    """A process that carries a cluster's name, as all of a cluster's do."""
    environment = {**os.environ, local_cluster._MARK: name}
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], env=environment, stdin=subprocess.PIPE)


def test_a_cluster_is_ended_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "_FOLDERS", tmp_path)
    for name in ("ray-one", "ray-two"):
        (tmp_path / name).mkdir()
    one, two = process_of("ray-one"), process_of("ray-two")
    try:
        wait_until(lambda: len(list(local_cluster._processes("ray-one"))) == 1, "the process has its environment")
        # A damaged file may say anything: the folder of all clusters must stay, and so must they.
        for damaged in ("", ".", "ray-one/../ray-two", "ray-"):
            end_cluster(damaged)
        assert one.poll() is None
        end_cluster("ray-one")
        assert one.wait() == -signal.SIGKILL
        assert two.poll() is None
        assert [folder.name for folder in tmp_path.iterdir()] == ["ray-two"]
    finally:
        for left in (one, two):
            left.kill()
            left.communicate()
