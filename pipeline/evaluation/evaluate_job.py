"""Entry of the evaluation job.

One Ray task measures everything side by side, on a GPU if there is one. Results are written as they arrive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from drafter.errors import LoadError
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.plan import Plan
from drafter.evaluation.questions import Question, QuestionError, read_questions
from drafter.evaluation.results import RESULTS_FILE, Cell, Results, Setting
from drafter.evaluation.tables import speed_tables, write_report
from drafter.target.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources, connect, share_out
from pipeline.command_line import say
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import measured
from pipeline.evaluation.verifiers import RESULTS_FILE as VERIFIERS_FILE
from pipeline.evaluation.verifiers import evaluate_verifiers
from pipeline.generate.config import LoadingConfig
from pipeline.settings import ResourcesConfig

Item = Results | list[Cell] | Progress | str
"""Items of the task: status lines, results without cells, then the cells of each setting, and progress."""

_LINE_SECONDS = 5.0


def evaluate(config: EvaluateConfig, command: str) -> None:
    """Run a job to its end; `command` is kept for the record.

    Raises:
        InputError: The configuration, the questions, the models or the output cannot be used.
        JobError: The job failed on the way.
    """
    try:
        questions = {name: read_questions(file, config.questions_per_file) for name, file in config.questions.items()}
    except QuestionError as error:
        raise InputError(str(error)) from error
    folder = Path(config.output).expanduser()
    earlier = open_output(folder)
    wanted = ResourcesConfig(gpus_per_actor=config.gpus)
    if config.verifiers is not None and earlier is not None:
        raise InputError(f"output {folder} holds an evaluation of drafters: choose another")
    if config.verifiers is None and (folder / VERIFIERS_FILE).exists():
        raise InputError(f"output {folder} holds an evaluation of verifiers: choose another")
    resources = share_out(wanted, connect(), what="evaluation", settings="{}")
    if config.verifiers is not None:
        evaluate_verifiers(config, questions, command, folder, resources)
        return
    done = frozenset(cell.setting for cell in earlier.cells) if earlier is not None else frozenset()
    results = collect(measure_on(resources, config, questions, command, done), folder, earlier)
    files = write_report(results, folder)
    print(f"{speed_tables(results)}\n")
    for one in results.skipped:
        print(f"left out: {one.drafter} with the {one.tree} tree: {one.reason}")
    print("written:  " + ", ".join(map(str, [folder / RESULTS_FILE, *files])), flush=True)


def open_output(folder: Path) -> Results | None:
    """Create the output folder. Return the results of an earlier submission; None if there are none.

    Raises:
        InputError: The folder cannot be created, or the earlier results cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Results.load(folder) if (folder / RESULTS_FILE).exists() else None
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"output {folder} has a damaged {RESULTS_FILE}: choose another output") from error


def measure_on(
    resources: ActorResources,
    config: EvaluateConfig,
    questions: Mapping[str, Sequence[Question]],
    command: str,
    done: frozenset[Setting],
) -> Iterator[Item]:
    """Yield what `measure` yields, run as a task on the cluster.

    Raises:
        InputError: The models or the questions cannot be used.
        JobError: The task failed.
    """
    return measured(
        resources,
        measure,
        model_name(config.model),
        config.loading,
        config.plan(),
        questions,
        config.questions,
        command,
        done,
        resources.threads,
        mistakes=(LoadError, QuestionError),
    )


def measure(
    model: str,
    loading: LoadingConfig,
    plan: Plan,
    questions: Mapping[str, Sequence[Question]],
    files: Mapping[str, str],
    command: str,
    done: frozenset[Setting],
    threads: int,
) -> Iterator[Item]:
    """Load the models and measure all settings but those in `done`. Runs on a worker.

    Raises:
        LoadError: A model cannot be loaded.
        QuestionError: The questions do not fit the target model or the plan.
    """
    torch.set_num_threads(threads)
    yield f"loading the model {model}"
    base = load_base(model, **asdict(loading))
    tokenizer = load_tokenizer(model, trust_remote_code=loading.trust_remote_code)
    yield "timing steps, and decoding the prompts"
    evaluation = Evaluation(base, tokenizer, questions, plan)
    yield evaluation.describe(command, files)
    yield from evaluation.run(done)


def collect(stream: Iterator[Item], folder: Path, earlier: Results | None) -> Results:
    """Collect and save the results as they arrive, and print progress.

    Raises:
        InputError: `earlier` holds another measurement.
    """
    while isinstance(results := next(stream), str):
        say(results)
    assert isinstance(results, Results)
    if earlier is not None:
        if not earlier.same_measurement(results):
            raise InputError(
                f"output {folder} holds another evaluation (settings, questions, models, machine or code): "
                "choose another"
            )
        results = earlier
    last_line = time.monotonic()
    for item in stream:
        if isinstance(item, list):
            results.cells.extend(item)
            results.save(folder)
        elif isinstance(item, Progress) and (item.done == item.total or time.monotonic() - last_line > _LINE_SECONDS):
            last_line = time.monotonic()
            temperature, batch, questions = item.setting
            where = f"temperature {temperature:g}, batch {batch}, {questions}"
            print(f"{where}: {item.done} of {item.total} turns of all arms", file=sys.stderr, flush=True)
    return results
