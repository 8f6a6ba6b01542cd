"""Runs measurements on the cluster: as an actor that is asked step by step, or as one task that streams results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import torch

from drafter.errors import one_line
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.shares import ActorResources
from pipeline.errors import InputError, JobError

Ask = Callable[..., Any]
"""Calls a method of the actor by its name, with arguments, and returns its result."""
Item = TypeVar("Item")
Mistakes = tuple[type[Exception], ...]


@contextmanager
def measuring(resources: ActorResources, kind: type, *arguments: Any, mistakes: Mistakes) -> Iterator[Ask]:
    """Run an actor on the cluster for as long as the context lasts; yields the function that asks it.

    Asking raises errors as `as_job_errors` does. The actor's constructor must not fail.
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


def measured(
    resources: ActorResources, measure: Callable[..., Iterator[Item]], *arguments: Any, mistakes: Mistakes
) -> Iterator[Item]:
    """Yield what `measure` yields, run as a task on the cluster. Raises errors as `as_job_errors` does."""
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0, "num_returns": "streaming"}
    with as_job_errors(mistakes):
        for item in ray.remote(**options)(measure).remote(*arguments):
            yield ray.get(item)


@contextmanager
def as_job_errors(mistakes: Mistakes) -> Iterator[None]:
    """Turn errors of this process and of workers into the job's.

    Raises:
        InputError: One of the `mistakes` was raised, here or by a worker.
        JobError: A worker failed otherwise.
    """
    try:
        yield
    except ray.exceptions.RayError as error:  # first: Ray's error is also of its cause's class, with a longer message
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, mistakes):
            raise InputError(str(cause)) from error
        raise JobError(f"{type(cause).__name__}: {one_line(cause)}") from error
    except mistakes as error:
        raise InputError(str(error)) from error


def load_models(model: str, loading: Mapping[str, Any], threads: int) -> tuple[BaseModel, Any]:
    """Load a target model and its tokenizer on a worker that has so many threads.

    Raises `LoadError` if one of them cannot be loaded.
    """
    torch.set_num_threads(threads)
    return load_base(model, **loading), load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
