"""The Ray cluster a job runs on: the one there is, or one of its own on this machine."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.services import find_bootstrap_address

from drafter.errors import one_line
from pipeline.errors import InputError, JobError
from pipeline.generate.generate_config import ResourcesConfig

HELPER_CPUS = 0.25
"""Cores of a task that reads, tokenises or writes: they work in short bursts beside the engines."""
_RESERVED_CPUS = 0.5
"""Cores of a node that engines leave to the helpers."""


@dataclass(frozen=True)
class Node:
    """What Ray may use of a machine.

    Args:
        cpus: Cores.
        gpus: GPUs.
    """

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Cluster:
    """The machines there are.

    Args:
        nodes: Those of now.
        may_grow: Others may join, or be started by an autoscaler. Which ones, Ray does not tell.
    """

    nodes: tuple[Node, ...]
    may_grow: bool


@dataclass(frozen=True)
class ActorResources:
    """What equal actors take.

    Args:
        cpus: Cores of one.
        gpus: GPUs of one.
        min_actors: Fewest of them.
        max_actors: Most of them; None is as many as there is work and room for.
    """

    cpus: float
    gpus: float
    min_actors: int
    max_actors: int | None

    @property
    def threads(self) -> int:
        """CPU threads of one."""
        return max(1, math.ceil(self.cpus))


def connect() -> Cluster:
    """Join the cluster of `RAY_ADDRESS`, `ray job submit` or `ray start`, or start one here; quietly.

    Raises:
        JobError: There is no cluster at the address.
    """
    may_grow = _join_or_start()
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return Cluster(tuple(Node(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in alive), may_grow)


def cluster_here(patience: float = 5.0) -> bool:
    """Whether a cluster on this machine can be joined.

    Ray leaves its address in a file. If all its processes were killed, the file stays, and `ray.init` would wait for
    minutes for somebody to answer there.

    Args:
        patience: Seconds that it may take to be answered.
    """
    address = find_bootstrap_address(None)
    if not address:
        return False
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience):
            return True
    except OSError:
        return False


def will_start() -> bool:
    """Whether `connect` would start a cluster, as there is none to join."""
    address = os.environ.get("RAY_ADDRESS")
    return not ray.is_initialized() and (address == "local" or (not address and not cluster_here()))


def _join_or_start() -> bool:
    """Whether it is a cluster that was there before."""
    if ray.is_initialized():
        return True
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the other lines mean nothing to the job's owner
    try:
        with _held_back_stderr():
            if will_start():
                # By default Ray lets every process go before its workers. An engine's threads wait for each other at
                # each operation, so that one which has to stand back holds up all.
                os.environ.setdefault("RAY_worker_niceness", "0")
                ray.init(address="local", include_dashboard=False, **quiet)
                return False
            ray.init(address="auto", **quiet)
    except Exception as error:  # Ray raises bare ones
        raise JobError(f"no Ray cluster could be reached or started: {one_line(error)}") from error
    return True


@contextmanager
def _held_back_stderr() -> Iterator[None]:
    """Keep what native code writes to stderr, and show it only if the block fails."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(original, held.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


def quiet_ray_data() -> None:
    """Turn off Ray Data's own bars and logs: the job shows what a person needs."""
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = 6 * 3600
    context.max_consecutive_actor_init_deaths = 3


def beside_driver() -> Any:
    """A scheduling strategy: on the driver's own node, which a job cannot lose and go on."""
    node = ray.get_runtime_context().get_node_id()
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def share_out(
    config: ResourcesConfig,
    cluster: Cluster,
    *,
    what: str = "engines",
    settings: str = "resources.{}_per_actor or resources.min_actors",
) -> ActorResources:
    """Divide a cluster among equal actors; what the configuration says goes first.

    Where nothing can run yet, as on a head that only waits for its autoscaler, an actor takes a GPU.

    Args:
        config: What is wanted.
        cluster: What there is.
        what: The actors' name, for the person who asked for too much.
        settings: What to lower then; `{}` stands for `cpus` or `gpus`.

    Raises:
        InputError: There is not enough for the fewest actors, and there will not be more.
    """
    useful = [node for node in cluster.nodes if node.cpus >= 1 or node.gpus]
    gpus = sum(node.gpus for node in useful)
    gpu_share = config.gpus_per_actor
    if gpu_share is None:
        gpu_share = float(gpus > 0 or (cluster.may_grow and not useful))
    most = config.max_actors
    if most is None and not cluster.may_grow:
        most = max(config.min_actors, math.floor(gpus / gpu_share)) if gpu_share else config.min_actors
    cpu_share = config.cpus_per_actor
    if cpu_share is None:
        cpu_share = _cpu_share(useful, gpu_share, most or config.min_actors)
    cpu_share = _leave_room(useful, cpu_share, gpu_share)
    found = ActorResources(cpu_share, gpu_share, config.min_actors, most)
    if not cluster.may_grow:
        _refuse_too_much(found, cluster, what, settings)
    elif not any(node.cpus >= cpu_share and node.gpus >= gpu_share for node in cluster.nodes):
        wanted = f"{cpu_share:g} CPU cores" + (f" and {gpu_share:g} GPUs" if gpu_share else "")
        print(f"no node has {wanted} for one of the {what} yet: waiting for the cluster to grow", file=sys.stderr)
    return found


def _cpu_share(nodes: Sequence[Node], gpu_share: float, actors: int) -> float:
    """Cores of an actor: one beside its GPUs; without GPUs, all that the smallest node has, shared by those on it."""
    if gpu_share:
        shares = [(node.cpus - _RESERVED_CPUS) * gpu_share / node.gpus for node in nodes if node.gpus >= gpu_share]
        return max(min([1.0, *shares]), 0.0)
    smallest = min((node.cpus for node in nodes if node.cpus), default=1.0 + _RESERVED_CPUS)
    on_one = math.ceil(actors / max(len(nodes), 1))
    return max((smallest - _RESERVED_CPUS) / on_one, 0.5)


def _leave_room(nodes: Sequence[Node], cpu_share: float, gpu_share: float) -> float:
    """Cores of an actor such that nodes full of actors have room for one helper.

    Ray sets no cores aside. If the nodes that are left after some were lost had none to spare, the engines would wait
    for input and the helpers for cores, forever.
    """
    shares = [cpu_share]
    for node in nodes:
        fit = math.floor(node.cpus / cpu_share) if cpu_share else 0
        if gpu_share:
            fit = min(fit, math.floor(node.gpus / gpu_share))
        if fit and node.cpus - fit * cpu_share < HELPER_CPUS:
            shares.append(max(node.cpus - HELPER_CPUS, 0.0) / fit)
    return min(shares)


def _refuse_too_much(wanted: ActorResources, cluster: Cluster, what: str, settings: str) -> None:
    for name, unit, share in (("cpus", "CPU cores", wanted.cpus), ("gpus", "GPUs", wanted.gpus)):
        have = sum(getattr(node, name) for node in cluster.nodes)
        if share * wanted.min_actors > have:
            raise InputError(
                f"{wanted.min_actors} × {share:g} {unit} for the {what} are more than the {have:g} of this machine: "
                f"lower {settings.format(name)}"
            )
