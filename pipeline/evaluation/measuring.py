"""Runs measurements on the cluster: as an actor that is asked step by step, or as one task that streams results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from drafter.errors import one_line
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.errors import InputError, JobError

Ask = Callable[..., Any]
"""Calls a method of the actor by its name, with arguments, and returns its result."""


@contextmanager
def measuring(
    resources: ActorResources, kind: type, *arguments: Any, mistakes: tuple[type[Exception], ...]
) -> Iterator[Ask]:
    """Run an actor on the cluster for as long as the context lasts; yields the function that asks it.

    Asking raises `InputError` where the actor raises one of the `mistakes`, and `JobError` where it fails otherwise.
    The actor's constructor must not fail.
    """
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": 0}
    actor = ray.remote(**options)(kind).remote(*arguments)

    def ask(method: str, *given: Any) -> Any:
        with as_job_errors(mistakes):
            return ray.get(getattr(actor, method).remote(*given))

    try:
        yield ask
    finally:
        ray.kill(actor)


Item = TypeVar("Item")


def measured(
    resources: ActorResources,
    measure: Callable[..., Iterator[Item]],
    *arguments: Any,
    mistakes: tuple[type[Exception], ...],
) -> Iterator[Item]:
    """Yield what `measure` yields, run as a task on the cluster.

    Raises:
        InputError: The task raised one of the `mistakes`.
        JobError: It failed otherwise.
    """
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0, "num_returns": "streaming"}
    with as_job_errors(mistakes):
        for item in ray.remote(**options)(measure).remote(*arguments):
            yield ray.get(item)


@contextmanager
def as_job_errors(mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn Ray's errors into the job's.

    Raises:
        InputError: The worker raised one of the `mistakes`.
        JobError: It failed otherwise.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, mistakes):
            raise InputError(str(cause)) from error
        raise JobError(f"{type(cause).__name__}: {one_line(cause)}") from error
