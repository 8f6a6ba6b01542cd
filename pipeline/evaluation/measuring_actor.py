"""An actor that measures what it is asked to, one thing after another, where what comes decides what is asked next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from pipeline.cluster.shares import ActorResources
from pipeline.evaluation.measuring_task import as_job_errors

Ask = Callable[..., Any]
"""Calls a method of the actor by its name, with arguments, and returns what it returns."""


@contextmanager
def measuring(
    resources: ActorResources, kind: type, *arguments: Any, mistakes: tuple[type[Exception], ...]
) -> Iterator[Ask]:
    """Run an actor on the cluster for as long as the context lasts, and give what asks it.

    Asking raises `InputError` where the actor raises one of the `mistakes`, and `JobError` where it fails otherwise.

    Args:
        resources: What the actor takes.
        kind: Its class, whose constructor does nothing that may fail.
        arguments: For the constructor.
        mistakes: Its errors that are the input's.
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
