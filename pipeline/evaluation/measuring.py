"""Runs measurements on the cluster: as an actor that is asked step by step, or as one task that streams results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import torch

from drafter.acceptance.settings import VerifierSettings
from drafter.errors import one_line
from drafter.evaluation.verifiers import EXACT, VerifierFigures
from drafter.images.loading import load_with_processor
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.models import enter
from pipeline.errors import InputError, JobError
from pipeline.report.scorers import Scorer, scores_of

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
        for item in ray.remote(**options)(_in_folder).remote(os.getcwd(), measure, *arguments):
            yield ray.get(item)


def _in_folder(folder: str, measure: Callable[..., Iterator[Item]], *arguments: Any) -> Iterator[Item]:
    enter(folder)
    yield from measure(*arguments)


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


def load_models(model: str, loading: Mapping[str, Any], threads: int, folder: str = "") -> tuple[BaseModel, Any]:
    """Load a target model and its tokenizer on a worker that has so many threads, or raise `LoadError`.

    An actor's process has yet to `enter` the driver's `folder`, where drafters may be; that of a task is there.
    """
    enter(folder)
    torch.set_num_threads(threads)
    base, _ = load_with_processor(model, **loading)
    return base, load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))


class ScoredVerifiers:
    """Measures verifiers on the requests of `VerifierTrials`, whose rows are `rows`; exact decoding at once."""

    def __init__(self, ask: Ask, rows: Sequence[Mapping[str, Any]], scorer: Scorer) -> None:
        self._ask, self._rows, self._scorer = ask, rows, scorer
        self._exact: list[float] = []
        self.exact = self.measure(EXACT)

    def measure(self, settings: VerifierSettings) -> VerifierFigures:
        """Return the figures of a verifier.

        Raises `InputError` if it does not fit or an answer cannot be scored, and `JobError` if the measurement failed.
        """
        found: VerifierFigures = self._ask("run", settings)
        scores = scores_of(self._rows, found.token_ids, found.texts, self._scorer)
        self._exact = self._exact or scores
        return found.scored(self._exact, scores)
