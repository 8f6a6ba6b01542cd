"""Entry of the evaluation job: one Ray task measures everything side by side, on a GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from drafter.errors import LoadError
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import Question, QuestionError, read_questions
from drafter.evaluation.results import RESULTS_FILE, Cell, Results, Setting
from drafter.evaluation.tables import speed_tables, write_report
from pipeline.cluster.ray_cluster import connect
from pipeline.cluster.shares import share_out
from pipeline.command_line import say
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import as_job_errors, load_models, measured
from pipeline.evaluation.verifiers import VERIFIERS_FILE, evaluate_verifiers
from pipeline.settings import ResourcesConfig

_LINE_SECONDS = 5.0


def evaluate(config: EvaluateConfig, command: str) -> None:
    """Run an evaluation to its end; `command` is kept for the record. Results are written as they arrive.

    Raises `InputError` if the questions, the models or the output cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions = {name: read_questions(file, config.questions_per_file) for name, file in config.questions.items()}
    folder = output_folder(config.output)
    earlier = _earlier_results(folder)
    if config.verifiers is not None and earlier is not None:
        raise InputError(f"output {folder} holds an evaluation of drafters: choose another")
    if config.verifiers is None and (folder / VERIFIERS_FILE).exists():
        raise InputError(f"output {folder} holds an evaluation of verifiers: choose another")
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="evaluation", settings="{}")
    if config.verifiers is not None:
        evaluate_verifiers(config, questions, command, folder, resources)
        return
    done = frozenset(cell.setting for cell in earlier.cells) if earlier is not None else frozenset()
    asked = (config, questions, command, done, resources.threads)
    results = _collect(measured(resources, _measure, *asked, mistakes=(LoadError, QuestionError)), folder, earlier)
    files = write_report(results, folder)
    print(f"{speed_tables(results)}\n")
    for one in results.skipped:
        print(f"left out: {one.drafter} with the {one.tree} tree: {one.reason}")
    print("written:  " + ", ".join(map(str, [folder / RESULTS_FILE, *files])), flush=True)


def output_folder(output: str) -> Path:
    folder = Path(output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _earlier_results(folder: Path) -> Results | None:
    """Return the results of an earlier submission; None if there are none."""
    try:
        return Results.load(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"output {folder} has a damaged {RESULTS_FILE}: choose another output") from error


def _measure(
    config: EvaluateConfig,
    questions: Mapping[str, Sequence[Question]],
    command: str,
    done: frozenset[Setting],
    threads: int,
) -> Iterator[Results | list[Cell] | Progress | str]:
    """Load the models and measure all settings but those in `done`. Runs on a worker.

    Yields status lines, then results without cells, then the cells of each setting, and progress.
    """
    model = model_name(config.model)
    yield f"loading the model {model}"
    base, tokenizer = load_models(model, asdict(config.loading), threads)
    yield "timing steps, and decoding the prompts"
    evaluation = Evaluation(base, tokenizer, questions, config.plan())
    yield evaluation.describe(command, config.questions)
    yield from evaluation.run(done)


def _collect(stream: Iterator[Results | list[Cell] | Progress | str], folder: Path, earlier: Results | None) -> Results:
    """Collect and save what `_measure` yields as it arrives, and print progress.

    Raises `InputError` if `earlier` holds another measurement.
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
            say(f"{where}: {item.done} of {item.total} turns of all arms")
    return results
