"""Division of a cluster among equal actors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.settings import ResourcesConfig

HELPER_CPUS = 0.25
"""Cores of a task that reads, tokenises or writes in short bursts beside the engines."""
_RESERVED_CPUS = 0.5
"""Cores per node that engines leave to such tasks."""


@dataclass(frozen=True)
class Node:
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Cluster:
    """The cluster's machines.

    Args:
        may_grow: Whether others may join, or be started by an autoscaler. Ray does not tell which ones.
    """

    nodes: tuple[Node, ...]
    may_grow: bool


@dataclass(frozen=True)
class ActorResources:
    """Resources of equal actors.

    Args:
        max_actors: Most actors; None is as many as there is work and room for.
    """

    cpus: float
    gpus: float
    min_actors: int
    max_actors: int | None

    @property
    def threads(self) -> int:
        return max(1, math.ceil(self.cpus))


def share_out(
    config: ResourcesConfig,
    cluster: Cluster,
    *,
    what: str = "engines",
    settings: str = "resources.{}_per_actor or resources.min_actors",
) -> ActorResources:
    """Divide a cluster among equal actors, respecting the configuration.

    Where nothing can run yet, as on a head that waits for its autoscaler, an actor takes a GPU.

    Args:
        what: The actors' designation in errors.
        settings: Settings that errors advise to lower; `{}` stands for `cpus` or `gpus`.

    Raises:
        InputError: There is not enough for the fewest actors, and the cluster cannot grow.
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
    shares = ActorResources(cpu_share, gpu_share, config.min_actors, most)
    if not cluster.may_grow:
        _refuse_too_much(shares, cluster, what, settings)
    elif not any(node.cpus >= cpu_share and node.gpus >= gpu_share for node in cluster.nodes):
        wanted = f"{cpu_share:g} CPU cores" + (f" and {gpu_share:g} GPUs" if gpu_share else "")
        print(f"no node has {wanted} for one of the {what} yet: waiting for the cluster to grow", file=sys.stderr)
    return shares


def _cpu_share(nodes: Sequence[Node], gpu_share: float, actors: int) -> float:
    """Return cores per actor: one beside its GPUs; without GPUs, the smallest node's, divided among its actors."""
    if gpu_share:
        shares = [(node.cpus - _RESERVED_CPUS) * gpu_share / node.gpus for node in nodes if node.gpus >= gpu_share]
        return max(min([1.0, *shares]), 0.0)
    smallest = min((node.cpus for node in nodes if node.cpus), default=1.0 + _RESERVED_CPUS)
    on_one = math.ceil(actors / max(len(nodes), 1))
    return max((smallest - _RESERVED_CPUS) / on_one, 0.5)


def _leave_room(nodes: Sequence[Node], cpu_share: float, gpu_share: float) -> float:
    """Return cores per actor such that a node full of actors has room for one helper task.

    Ray reserves no cores. If nodes were lost and the others had none to spare, engines would wait for input and helpers
    for cores, forever.
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
