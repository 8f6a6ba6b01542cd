"""The Ray cluster of a job: joining or starting one, and dividing it among equal actors."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import ray
from ray._private.services import find_bootstrap_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drafter.errors import one_line
from drafter.source_commit import ROOT
from pipeline.command_line import say
from pipeline.errors import InputError, NoClusterError
from pipeline.settings import ResourcesConfig

LOOPBACK = "127.0.0.1"
HELPER_CPUS = 0.25  # of a task that reads, tokenises or writes in short bursts beside the engines
_RESERVED_CPUS = 0.5  # of a node, which engines leave to such tasks
_PACKAGES = ("drafter", "jobs", "pipeline")
_SERVER_PORTS = range(20_000, 30_000)  # above those of Ray's workers, below those of connections and of Kubernetes
_NO_PROGRESS_SECONDS = 6 * 3600  # such as after losing all machines; then a job fails


@dataclass(frozen=True)
class Node:
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Cluster:
    """The cluster's machines; `may_grow` if others may join. Ray does not tell which ones an autoscaler may start."""

    nodes: tuple[Node, ...]
    may_grow: bool


@dataclass(frozen=True)
class ActorResources:
    """Resources of equal actors; `max_actors` is None for as many as there is work and room for."""

    cpus: float
    gpus: float
    min_actors: int
    max_actors: int | None

    @property
    def threads(self) -> int:
        return max(1, math.ceil(self.cpus))


def connect() -> Cluster:
    """Join the cluster of `RAY_ADDRESS`, `ray job submit` or `ray start`, or start one here.

    Raises `NoClusterError` if neither works.
    """
    may_grow = _join_or_start()
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return Cluster(tuple(Node(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in alive), may_grow)


def takes(resources: ActorResources) -> str:
    """Describe an actor's resources and how much of the cluster is free."""
    free, there = ray.available_resources(), ray.cluster_resources()
    parts = [
        f"{share:g} {unit} ({free.get(name, 0.0):g} of {there.get(name, 0.0):g} are free)"
        for share, unit, name in ((resources.cpus, "CPU cores", "CPU"), (resources.gpus, "GPUs", "GPU"))
        if share
    ]
    return " and ".join(parts)


def listens(address: str, patience: float = 5.0) -> bool | None:
    """Return whether a process listens at an address: False if the connection is refused, None if nothing answers."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def cluster_here(patience: float = 5.0) -> bool:
    """Return whether a cluster on this machine can be joined."""
    # Ray leaves its address in a file that only this private function reads. If all its processes were killed, the file
    # stays, and `ray.init` would wait for minutes.
    address = find_bootstrap_address(None)
    return bool(address and listens(address, patience))


def will_start() -> bool:
    address = os.environ.get("RAY_ADDRESS")
    return not ray.is_initialized() and (address == "local" or (not address and not cluster_here()))


def _join_or_start() -> bool:
    # True if the cluster existed before.
    if ray.is_initialized():
        return True
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "runtime_env": _own_packages()}
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the other lines mean nothing to the job's owner
    starts = will_start()
    try:
        say("starting Ray on this machine" if starts else "joining the Ray cluster")
        with _held_back_stderr():
            if starts:
                # By default Ray runs its workers at a lower priority than every other process. An engine's threads
                # wait for each other at each operation, so one that has to stand back holds up all.
                os.environ.setdefault("RAY_worker_niceness", "0")
                _keep_to_this_machine()
                ray.init(address="local", include_dashboard=False, **quiet)
                return False
            ray.init(address="auto", **quiet)
    except Exception as error:  # Ray raises bare ones
        failed, advice = "joined", "see whether one runs there, or set RAY_ADDRESS=local to start one here"
        if starts:  # Ray reads the variable when it is imported: here it would be set too late
            failed, advice = "started", "on a busy machine, try again with RAY_raylet_start_wait_time_s=120 set"
        raise NoClusterError(f"no Ray cluster could be {failed}: {one_line(error).rstrip('.')}: {advice}") from error
    return True


def _own_packages() -> dict[str, Any] | None:
    # Ray puts the driver's working directory first on its workers' path, where a folder may have one of our packages'
    # names. None where Ray's own environment suffices.
    root, here = str(ROOT), [os.getcwd()]
    if Path.cwd() == ROOT or not any(PathFinder.find_spec(name, here) for name in _PACKAGES):
        return None

    def import_ours() -> None:  # pickled as code: a worker that has to find it in a module would look in the wrong one
        import importlib
        import sys

        sys.path.insert(0, root)
        for name in ("drafter", "pipeline"):  # before the first task, for which Ray changes the path
            importlib.import_module(name)

    return {"worker_process_setup_hook": import_ours}


def _keep_to_this_machine() -> None:
    # By default Ray (2.60) uses the machine's own address, where two of its processes give metrics to anyone, and
    # writes its token to a file that all users can read.
    from ray._private import ray_constants

    # The setting by which Ray keeps to the loopback address on macOS. This process has read it already.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    token = Path.home() / ".ray" / "auth_token"  # where Ray looks for it
    token.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    if token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens on.

    A port that the system would choose can be the near end of any connection made before a server takes it, so these
    are none of those, nor of Ray's own.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)):
            if len(found) == count:
                break
            with suppress(OSError):
                stack.enter_context(socket.create_server((LOOPBACK, port)))
                found.append(port)
    return found


@contextmanager
def _held_back_stderr() -> Iterator[None]:
    # Native code's stderr, which is shown only if the block fails.
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
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = _NO_PROGRESS_SECONDS
    context.max_consecutive_actor_init_deaths = 3


def start_beside_driver(actor: type, *arguments: Any) -> Any:
    """Start an actor without a core on the driver's node, the one node that a job cannot outlive."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(**options)(actor).remote(*arguments)


@contextmanager
def nodes_ahead(gpus: float, count: int) -> Iterator[None]:
    """Have an autoscaler start nodes during the block for `count` actors of so many GPUs that come after it.

    What asks for the nodes holds GPUs alone, so that the block's own tasks find cores.
    """
    places = [placement_group([{"GPU": gpus}]) for _ in range(count)]
    try:
        yield
    finally:
        for place in places:
            remove_placement_group(place)


def share_out(
    config: ResourcesConfig,
    cluster: Cluster,
    *,
    ranks: int = 1,
    what: str = "engines",
    settings: str = "resources.{}_per_actor or resources.min_actors",
) -> ActorResources:
    """Divide a cluster among equal actors.

    Where nothing can run yet, as on a head that waits for its autoscaler, an actor takes a GPU.

    Args:
        ranks: Processes of an actor that take a GPU each, where there are some.
        what: The actors' designation in errors.
        settings: Settings that errors advise to lower; `{}` stands for `cpus` or `gpus`.

    Raises:
        InputError: There is not enough for the fewest actors, and the cluster cannot grow.
    """
    useful = [node for node in cluster.nodes if node.cpus >= 1 or node.gpus]
    gpus = sum(node.gpus for node in useful)
    gpu_share = config.gpus_per_actor
    if gpu_share is None:
        gpu_share = float(ranks * (gpus > 0 or (cluster.may_grow and not useful)))
    elif ranks > 1 and gpu_share not in (0, ranks):
        raise InputError(
            f"engine.tensor_parallel_size {ranks} takes as many GPUs, and each of the {what} is to have {gpu_share:g}: "
            "leave that out"
        )
    most = config.max_actors
    if most is None and not cluster.may_grow:
        most = max(config.min_actors, math.floor(gpus / gpu_share)) if gpu_share else config.min_actors
    cpu_share = config.cpus_per_actor
    if cpu_share is None:
        cpu_share = _cpu_share(useful, gpu_share, most or config.min_actors, ranks)
    cpu_share = _leave_room(useful, cpu_share, gpu_share)
    shares = ActorResources(cpu_share, gpu_share, config.min_actors, most)
    if not cluster.may_grow:
        _refuse_too_much(shares, cluster, what, settings)
    elif not any(node.cpus >= cpu_share and node.gpus >= gpu_share for node in cluster.nodes):
        wanted = f"{cpu_share:g} CPU cores" + (f" and {gpu_share:g} GPUs" if gpu_share else "")
        say(f"no node has {wanted} for one of the {what} yet: waiting for the cluster to grow")
    return shares


def _cpu_share(nodes: Sequence[Node], gpu_share: float, actors: int, ranks: int) -> float:
    # One core beside the GPU of each process; without GPUs, the smallest node's, divided among its actors.
    if gpu_share:
        shares = [(node.cpus - _RESERVED_CPUS) * gpu_share / node.gpus for node in nodes if node.gpus >= gpu_share]
        return max(min([float(ranks), *shares]), 0.0)
    smallest = min((node.cpus for node in nodes if node.cpus), default=1.0 + _RESERVED_CPUS)
    on_one = math.ceil(actors / max(len(nodes), 1))
    return max((smallest - _RESERVED_CPUS) / on_one, 0.5)


def _leave_room(nodes: Sequence[Node], cpu_share: float, gpu_share: float) -> float:
    # Ray reserves no cores. If nodes were lost and the others had none to spare for a helper task, engines would wait
    # for input and helpers for cores, forever.
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
