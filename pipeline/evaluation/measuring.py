"""Runs measurements on the cluster, as one task that streams results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import torch

from drafter.errors import one_line
from drafter.images.loading import load_with_processor
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.models import enter
from pipeline.errors import InputError, JobError

Item = TypeVar("Item")
Mistakes = tuple[type[Exception], ...]


def measured(
    resources: ActorResources, measure: Callable[..., Iterator[Item]], *arguments: Any, mistakes: Mistakes
) -> Iterator[Item]:
    """Yield what `measure` yields, run as a task on the cluster. Raises errors as `as_job_errors` does."""
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0, "num_returns": "streaming"}
    with as_job_errors(mistakes):
        for item in ray.remote(**options)(_in_folder).remote(os.getcwd(), measure, *arguments):
            yield ray.get(item)


def _in_folder(folder: str, measure: Callable[..., Iterator[Item]], *arguments: Any) -> Iterator[Item]:
    enter(folder)
    yield from measure(*arguments)


@contextmanager
def as_job_errors(mistakes: Mistakes) -> Iterator[None]:
    """Turn errors of this process and of workers into the job's.

    Raises `InputError` if one of the `mistakes` was raised, here or by a worker, and `JobError` if a worker failed
    otherwise.
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
    """Load a target model and its tokenizer on a worker that has so many threads, or raise `LoadError`."""
    torch.set_num_threads(threads)
    base, _ = load_with_processor(model, **loading)
    return base, load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
