"""The chain: every job of a run that is not done is submitted, one after another.

A stage is done when a job with its command and its settings has succeeded; `jobs/done.json` in the output says which. A
stage whose settings have changed since is submitted again, and so are all that read what it makes; each job decides
whether its output can be gone on with. What is interrupted, at whatever moment, is gone on with by the same command:
finished stages are passed over, a job that is still under way on the cluster is followed, and one that was killed goes
on from what it has written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from drafter.errors import one_line
from examples.local_cluster import LocalCluster, NodeType, end_cluster
from pipeline.errors import InputError, JobError
from pipeline.io.files import locate
from recipes.paper.paper_config import PaperConfig
from recipes.paper.stage_jobs import Places, Stage

_ROOT = Path(__file__).resolve().parents[2]
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_CLUSTER = "cluster"
"""File in the output that names the cluster that was started here, as long as there is one."""

Submit = Callable[[Stage], int]
"""Submits a stage's job, waits for its end, and returns the exit code of `drafter submit`."""


def run_chain(stages: list[Stage], places: Places, submit: Submit) -> None:
    """Submit the jobs that are not done.

    Args:
        stages: All jobs, in order.
        places: Where the output is.
        submit: Submits one.

    Raises:
        InputError: A job has a mistake in its settings or its input.
        JobError: A job failed.
        KeyboardInterrupt: Watching a job was interrupted.
    """
    done = _read_done(places)
    for number, stage in enumerate(stages, start=1):
        if _is_done(stage, done):
            continue
        print(f"--- {number} of {len(stages)}: {stage.name}", flush=True)
        if stage.file is not None:
            write_whole(stage.file, stage.text)
        code = submit(stage)
        if code == 130:
            raise KeyboardInterrupt
        if code == 2:
            raise InputError(f"stage {stage.name} has a mistake in its settings or its input: see above")
        if code:
            raise JobError(f"stage {stage.name} failed: see above")
        done[stage.name] = stage.digest
        write_whole(_done_file(places), json.dumps(done, indent=1) + "\n")


def needs_cluster(stages: list[Stage], places: Places) -> bool:
    """Return whether a job is to be submitted, or a cluster is to be ended."""
    done = _read_done(places)
    return (places.folder / _CLUSTER).exists() or not all(_is_done(stage, done) for stage in stages)


def _is_done(stage: Stage, done: Mapping[str, str]) -> bool:
    return done.get(stage.name) == stage.digest


def _done_file(places: Places) -> Path:
    return places.folder / "jobs" / "done.json"


def _read_done(places: Places) -> dict[str, str]:
    """Return which stages are done, by name. A torn file says nothing: every job sees itself whether it is done."""
    file = _done_file(places)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        print(f"{file} is damaged: every job is asked again whether it is done", file=sys.stderr, flush=True)
        return {}
    return dict(found) if isinstance(found, dict) else {}


def submission_name(stage: Stage, places: Places) -> str:
    """Return what a stage's submissions are called: the same name in every run of the same output, and in no other."""
    where = hashlib.sha256(str(places.folder).encode()).hexdigest()[:8]
    return f"paper-{where}-{stage.name}"


def entrypoint(stage: Stage) -> list[str]:
    """Return what is run for a stage: its command, which names its settings by their path alone, and their digest.

    `drafter submit` follows a job of the same name only if it runs the same. One that is still under way with earlier
    settings is neither taken for this one, nor does a second one start to write to its output: this one is refused.
    """
    return ["env", f"PAPER_STAGE={stage.digest}", *stage.command]


def submitter(config: PaperConfig, places: Places, environment: Mapping[str, str]) -> Submit:
    """Return what submits a stage by `drafter submit`.

    Args:
        config: The run.
        places: Where its output is.
        environment: The environment that `drafter submit` runs in.
    """

    def submit(stage: Stage) -> int:
        command = [sys.executable, "-m", "jobs.submit", "--name", submission_name(stage, places)]
        command += ["--submissions", str(config.submissions)]
        if config.address is not None:
            command += ["--address", config.address]
        with subprocess.Popen([*command, "--", *entrypoint(stage)], cwd=_ROOT, env=dict(environment)) as process:
            try:
                return process.wait()
            except SystemExit:  # SIGTERM
                process.terminate()
                raise

    return submit


@contextmanager
def cluster_for(config: PaperConfig, places: Places) -> Iterator[dict[str, str]]:
    """Yield the environment in which jobs are submitted: to the cluster that is named, or to one that is started here.

    A run that was killed has left its cluster running. Whoever runs next ends it first, so that no two work on the
    output; what its job had written is gone on with.

    Raises:
        JobError: The cluster does not start.
    """
    file = places.folder / _CLUSTER
    if file.exists():
        end_cluster(file.read_text(encoding="utf-8"))
        file.unlink()
    if config.address is not None or os.environ.get(_ADDRESS):
        with _ended_by_sigterm():
            yield dict(os.environ)
        return
    cores = os.cpu_count() or 1
    cluster = LocalCluster([NodeType(cpus=max(cores, 2), gpus=_gpus() if config.gpus is None else config.gpus)])
    write_whole(file, cluster.name)
    try:
        with _ended_by_sigterm(), cluster:
            print(f"a cluster is up on this machine, its dashboard at {cluster.jobs_address}", flush=True)
            yield cluster.environment
    finally:
        file.unlink(missing_ok=True)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, or the cluster, and who follows a job, would outlive this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def alone(places: Places) -> Iterator[None]:
    """Hold the output for one process. The system lets go of it when the process ends, however it ends.

    Raises:
        InputError: Another process holds it.
        JobError: The output cannot be written to.
    """
    try:
        places.folder.mkdir(parents=True, exist_ok=True)
        lock = (places.folder / "lock").open("w")
    except OSError as error:
        raise JobError(f"output {places.folder} cannot be written to: {one_line(error)}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run works on {places.folder}: wait for it, or choose another output") from None
        yield


def write_whole(file: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    locate(str(file)).write_text(text)
