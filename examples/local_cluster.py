"""A Ray cluster of several nodes on this machine, isolated from any other Ray there."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from pipeline.cluster.ray_cluster import LOOPBACK, free_ports
from pipeline.errors import JobError

_MARK = "DRAFTER_LOCAL_CLUSTER"
_PREFIX = "ray-"
_FOLDERS = Path("/tmp")
"""Parent of the clusters' folders: paths of sockets must be short."""
_START_SECONDS = 300
_OBJECT_STORE_BYTES = 128 << 20
_UNUSED_LISTS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
"""Keys that the autoscaler requires in its configuration, for node setup."""


@dataclass(frozen=True)
class NodeType:
    """A kind of nodes; an autoscaler starts `most` at most, without the `environment`."""

    cpus: int
    gpus: int = 0
    most: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalCluster:
    """A head that runs no work, and worker nodes, started at once or by an autoscaler.

    Use it in a `with` statement; at its end all processes of the cluster are killed.

    Args:
        growing: Kinds of nodes, by name, that an autoscaler starts, and ends after `idle_seconds` without work.
        head_environment: Environment variables of the head's processes, besides the cluster's.
    """

    def __init__(
        self,
        nodes: Sequence[NodeType] = (),
        growing: Mapping[str, NodeType] | None = None,
        idle_seconds: float = 5.0,
        head_environment: Mapping[str, str] | None = None,
    ) -> None:
        self._nodes, self._growing, self._idle_seconds = nodes, growing or {}, idle_seconds
        self._head_environment = head_environment or {}
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS))
        self._gcs, self._dashboard, self._client = free_ports(3)
        self._head: list[int] = []
        self.environment: dict[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            # In a job's command, `python` is the interpreter that runs this.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "RAY_ADDRESS": f"{LOOPBACK}:{self._gcs}",
            "RAY_API_SERVER_ADDRESS": self.jobs_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        """Environment of a process that joins the cluster or submits jobs to it."""

    @property
    def jobs_address(self) -> str:
        return f"http://{LOOPBACK}:{self._dashboard}"

    def __enter__(self) -> LocalCluster:
        try:
            self._start_head()
            self._head = self._raylets()
            for node in self._nodes:
                self._start(node, "--address", f"{LOOPBACK}:{self._gcs}")
        except BaseException:
            end_cluster(self.name)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_cluster(self.name)

    @property
    def name(self) -> str:
        """Name for `end_cluster`, also in another process."""
        return self._folder.name

    def nodes(self) -> list[int]:
        """Return the process ids of the nodes' raylets, without the head's. A node ends with its raylet."""
        return [pid for pid in self._raylets() if pid not in self._head]

    def _raylets(self) -> list[int]:
        return [pid for pid in _processes(self.name) if _command(pid) == "raylet"]

    def _start_head(self) -> None:
        options = ["--head", "--port", self._gcs, "--dashboard-host", LOOPBACK, "--dashboard-port", self._dashboard]
        options += ["--ray-client-server-port", self._client, "--temp-dir", self._folder]
        environment = dict(self._head_environment)
        if self._growing:
            config = self._folder / "autoscaler.json"
            config.write_text(json.dumps(self._autoscaler_config()))
            options += ["--autoscaling-config", config]
            environment |= {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            }
        self._start(NodeType(cpus=0, environment=environment), *options)

    def _autoscaler_config(self) -> dict[str, Any]:
        types = {
            name: {
                "resources": {"CPU": kind.cpus, "GPU": kind.gpus, "object_store_memory": _OBJECT_STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": kind.most,
            }
            for name, kind in self._growing.items()
        }
        types["ray.head.default"] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": self._folder.name,
            "max_workers": sum(kind.most for kind in self._growing.values()),
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": self._idle_seconds / 60,
            "provider": {
                "type": "external",  # under its own name, the provider wants a file that is not in the wheel
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": f"{LOOPBACK}:{self._gcs}",
                "head_node_id": FAKE_HEAD_NODE_ID,
                "launch_multiple": True,
                "disable_node_updaters": True,
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "docker": {},
            "file_mounts": {},
            **{name: [] for name in _UNUSED_LISTS},
        }

    def _start(self, node: NodeType, *options: Any) -> None:
        command: list[Any] = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", LOOPBACK]
        command += ["--object-store-memory", _OBJECT_STORE_BYTES, "--min-worker-port", 0, "--max-worker-port", 0]
        command += ["--num-cpus", node.cpus, "--num-gpus", node.gpus, "--dashboard-agent-listen-port", 0, *options]
        log = self._folder / "start.log"
        with log.open("ab") as output:
            started = subprocess.run(
                [str(part) for part in command],
                env={**self.environment, _MARK: self.name, **node.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_START_SECONDS,
            )
        if started.returncode:
            raise JobError(f"a node of the local cluster did not start: {log.read_text()[-2_000:]}")


def end_cluster(name: str) -> None:
    """Kill all processes of a local cluster and delete its folder. Text that is no cluster's name is ignored."""
    if not re.fullmatch(rf"{_PREFIX}\w+", name):
        return
    while left := list(_processes(name)):  # while some are killed, others may start new ones
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(_FOLDERS / name, ignore_errors=True)


def _processes(name: str) -> Iterator[int]:
    """Find all processes of a cluster by their environment, whatever their parents are by now."""
    mark = f"{_MARK}={name}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has just ended, or belongs to another user
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
