"""The Ray cluster a job runs on: the one there is, or one of its own on this machine."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from pipeline.config import ResourcesConfig
from pipeline.errors import InputError, JobError, one_line

HELPER_CPUS = 0.25
"""Cores of a task that reads, tokenises or writes: they work in short bursts beside the engines."""
_RESERVED_CPUS = 0.5


@dataclass(frozen=True)
class ActorResources:
    """What equal actors take.

    Args:
        cpus: Cores of one.
        gpus: GPUs of one.
        min_actors: Fewest of them.
        max_actors: Most of them.
    """

    cpus: float
    gpus: float
    min_actors: int
    max_actors: int


def connect() -> bool:
    """Join the cluster of `RAY_ADDRESS`, `ray job submit` or `ray start`, or start one here; quietly.

    Returns:
        Whether the cluster may be larger than this machine, or become so.

    Raises:
        JobError: There is no cluster at the address.
    """
    if ray.is_initialized():
        return True
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the other lines mean nothing to the job's owner
    try:
        with _held_back_stderr():
            try:
                ray.init(address="auto", **quiet)
            except ConnectionError:
                if "RAY_ADDRESS" in os.environ:
                    raise
                ray.init(address="local", include_dashboard=False, **quiet)
                return False
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
    *,
    may_grow: bool,
    what: str = "engines",
    settings: str = "resources.{}_per_actor or resources.min_actors",
) -> ActorResources:
    """Divide the cluster among equal actors; what the configuration says goes first.

    Args:
        config: What is wanted.
        may_grow: There may be more later than there is now.
        what: The actors' name, for the person who asked for too much.
        settings: What to lower then; `{}` stands for `cpus` or `gpus`.

    Raises:
        InputError: There is not enough for the fewest actors, and there will not be more.
    """
    total = ray.cluster_resources()
    cpus, gpus = total.get("CPU", 0.0), total.get("GPU", 0.0)
    gpu_share = config.gpus_per_actor if config.gpus_per_actor is not None else float(gpus > 0)
    most = config.max_actors
    if most is None:
        most = max(config.min_actors, math.floor(gpus / gpu_share)) if gpu_share else config.min_actors
    cpu_share = config.cpus_per_actor
    if cpu_share is None:
        cpu_share = 1.0 if gpu_share else max((cpus - _RESERVED_CPUS) / most, 0.5)
    for name, unit, share, have, spare in (
        ("cpus", "CPU cores", cpu_share, cpus, HELPER_CPUS),
        ("gpus", "GPUs", gpu_share, gpus, 0.0),
    ):
        if not may_grow and share * config.min_actors + spare > have:
            raise InputError(
                f"{config.min_actors} × {share:g} {unit} for the {what} are more than the {have:g} of this machine"
                f"{' (a little is kept for reading and writing)' if spare else ''}: lower {settings.format(name)}"
            )
    return ActorResources(cpu_share, gpu_share, config.min_actors, most)
