"""The evaluation job: drafters are measured side by side, on a GPU if there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from drafter.errors import LoadError, one_line
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import Question, QuestionError, read_questions, spread
from drafter.evaluation.results import RESULTS_FILE, Cell, Plan, Results, Setting, figures
from drafter.evaluation.tables import remarks, speed_tables, with_interval, write_report
from drafter.images.loading import Eyes
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import ActorResources, connect, share_out
from pipeline.command_line import say
from pipeline.engines.models import enter, head_fingerprints, model_fingerprint
from pipeline.errors import InputError, JobError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.settings import ResourcesConfig

_LINE_SECONDS = 5.0

Item = TypeVar("Item")
Mistakes = tuple[type[Exception], ...]
Questions = Mapping[str, Sequence[Question]]


def evaluate(config: EvaluateConfig, command: str) -> None:
    """Measure all settings except those of earlier submissions, and write the report; `command` is kept for the record.

    Raises `InputError` if the questions, the models or the output cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions, files = _questions(config)
    folder = output_folder(config.output)
    earlier = _earlier_results(folder)
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="evaluation", settings="{}")
    done = frozenset(cell.setting for cell in earlier.cells) if earlier is not None else frozenset()
    asked = (config, questions, files, command, done, resources.threads)
    results, last_line = earlier, 0.0
    for item in measured(resources, _measure, *asked, mistakes=(LoadError, QuestionError, InputError)):
        if isinstance(item, str):
            say(item)
        elif isinstance(item, Results):
            if earlier is not None and earlier.identity != item.identity:
                raise _unusable(folder, "holds another evaluation (settings, questions, models, machine or code)")
            results, last_line = earlier or item, time.monotonic()
        elif isinstance(item, list):
            assert results is not None
            results.cells.extend(item)
            results.save(folder)
        elif item.done == item.total or time.monotonic() - last_line > _LINE_SECONDS:
            last_line = time.monotonic()
            temperature, batch, name = item.setting
            where = f"temperature {temperature:g}, batch {batch}, {name}"
            say(f"{where}: {item.done} of {item.total} turns of all arms")
    assert results is not None
    file = write_report(results, folder)
    print("\n\n".join([*remarks(results), speed_tables(results), _gains(results)]), end="\n\n")
    for one in results.skipped:
        print(f"left out: {one.drafter} with the {one.tree} tree: {one.reason}")
    print(f"written:  {folder / RESULTS_FILE}, {file}", flush=True)


def output_folder(output: str) -> Path:
    folder = Path(output).expanduser()
    if "://" in output:
        raise InputError(f"output {output} is an address: give a folder of this machine")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _unusable(folder: Path, why: str) -> InputError:
    return InputError(f"output {folder} {why}: choose another")


def _questions(config: EvaluateConfig) -> tuple[dict[str, list[Question]], dict[str, str]]:
    """Return the sets of questions by name, and the file of each: all of it, or one category of it, as `chat: math`."""
    sets: dict[str, list[Question]] = {}
    files: dict[str, str] = {}
    for name, file in config.files.items():
        for question in read_questions(file):
            apart = config.by_category and question.category
            of = f"{name}: {question.category}" if apart else name
            sets.setdefault(of, []).append(question)
            files[of] = file
    return {name: spread(some, config.questions_per_file) for name, some in sets.items()}, files


def _plan(config: EvaluateConfig, questions: Questions) -> Plan:
    return config.plan(min(sum(len(one.turns) for one in some) for some in questions.values()) * config.samples)


def _gains(results: Results) -> str:
    """Say what the fastest drafter is worth at each setting."""
    lines = []
    of_setting = attrgetter("cell.setting")
    drafted = (one for one in figures(results.cells) if one.cell.arm.tree is not None)
    for (temperature, batch, name), some in groupby(sorted(drafted, key=of_setting), of_setting):
        best = max(some, key=attrgetter("gamma"))
        times = with_interval(best.gamma, best.gamma_interval)
        gain = f"{best.cell.arm.method} is {times} times as fast as plain decoding"
        lines.append(f"{name}, temperature {temperature:g}, batch {batch}: {gain}, with {best.rate:,.0f} tokens/s")
    return "\n".join(lines)


def _earlier_results(folder: Path) -> Results | None:
    """Return the results of an earlier submission; None if there are none."""
    try:
        return Results.load(folder)
    except FileNotFoundError as error:
        if any(not name.endswith(".partial") for name in os.listdir(folder)):
            raise _unusable(folder, f"is not empty and has no {RESULTS_FILE}") from error
        return None
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    except ValueError as error:
        raise _unusable(folder, f"has a damaged {RESULTS_FILE}") from error


def _measure(
    config: EvaluateConfig,
    questions: Questions,
    files: Mapping[str, str],
    command: str,
    done: frozenset[Setting],
    threads: int,
) -> Iterator[str | Results | list[Cell] | Progress]:
    """Load the models and measure all settings but those in `done`. Runs on a worker.

    Yields status lines, then results without cells, then the cells of each setting, and progress.
    """
    model = model_name(config.model)
    yield f"loading the model {model}"
    base, tokenizer = load_models(model, asdict(config.loading), threads)
    yield "timing steps, and decoding the prompts"
    plan = _plan(config, questions)
    evaluation = Evaluation(base, tokenizer, questions, plan)
    results = evaluation.describe(command, files)
    # Of the chat template, too, and of what drafters are merged from: cells of others are not put beside these.
    parts = [head_fingerprints(config.model, name) for name in plan.drafters]
    results.plan["files"] = [model_fingerprint(model), *parts]
    yield results
    yield from evaluation.run(done)


# A measurement on the cluster: one task that streams results.


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
    base = load_base(model, eyes=Eyes(), **loading)
    return base, load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
