"""The settings `resources.*`: what a job takes of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.command_line import at_least
from pipeline.errors import InputError


@dataclass(frozen=True)
class ResourcesConfig:
    """What the job takes of the cluster.

    Args:
        min_actors: Engines to start with.
        max_actors: Most engines. By default, on a cluster, as many as there is work and room for; on one machine, one
            for each GPU (or share of one), or `min_actors` where there is no GPU.
        gpus_per_actor: GPUs of an engine, a fraction allowed. By default 1 where there are GPUs, or where nothing can
            run yet; otherwise 0. Set it for a cluster that has only CPUs now and is to get GPUs.
        cpus_per_actor: CPU cores of an engine, and so its threads. By default at most 1 beside a GPU; otherwise all
            cores of a node but half a core, divided among the node's engines. Lowered a little where engines would
            leave no core of a node to anything else.
    """

    min_actors: int = 1
    max_actors: int | None = None
    gpus_per_actor: float | None = None
    cpus_per_actor: float | None = None

    def __post_init__(self) -> None:
        at_least("resources.min_actors", self.min_actors, 1)
        if self.max_actors is not None:
            at_least("resources.max_actors", self.max_actors, self.min_actors)
        at_least("resources.gpus_per_actor", self.gpus_per_actor, 0)
        if self.gpus_per_actor is not None and self.gpus_per_actor > 1 and self.gpus_per_actor % 1:
            raise InputError(f"resources.gpus_per_actor must be whole above 1, not {self.gpus_per_actor:g}")
        at_least("resources.cpus_per_actor", self.cpus_per_actor, 0, above=True)
