"""The evaluation job: drafters are measured side by side, on a GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from drafter.errors import LoadError
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import Question, QuestionError, read_questions
from drafter.evaluation.results import RESULTS_FILE, Cell, Plan, Results, Setting, figures
from drafter.evaluation.tables import speed_tables, with_interval, write_report
from pipeline.cluster.model_copies import model_name
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import as_job_errors, load_models, measured
from pipeline.settings import ResourcesConfig

_LINE_SECONDS = 5.0

Questions = Mapping[str, Sequence[Question]]


def evaluate(config: EvaluateConfig, command: str) -> None:
    """Measure all settings except those of earlier submissions, and write the report; `command` is kept for the record.

    Raises `InputError` if the questions, the models or the output cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions = {name: read_questions(file, config.questions_per_file) for name, file in config.files.items()}
    folder = output_folder(config.output)
    earlier = _earlier_results(folder)
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="evaluation", settings="{}")
    done = frozenset(cell.setting for cell in earlier.cells) if earlier is not None else frozenset()
    asked = (config, questions, command, done, resources.threads)
    results, last_line = earlier, 0.0
    for item in measured(resources, _measure, *asked, mistakes=(LoadError, QuestionError)):
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
    print(f"{speed_tables(results)}\n\n{_gains(results)}\n")
    for one in results.skipped:
        print(f"left out: {one.drafter} with the {one.tree} tree: {one.reason}")
    print(f"written:  {folder / RESULTS_FILE}, {file}", flush=True)


def output_folder(output: str) -> Path:
    folder = Path(output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _unusable(folder: Path, why: str) -> InputError:
    return InputError(f"output {folder} {why}: choose another")


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
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    except ValueError as error:
        raise _unusable(folder, f"has a damaged {RESULTS_FILE}") from error


def _measure(
    config: EvaluateConfig, questions: Questions, command: str, done: frozenset[Setting], threads: int
) -> Iterator[str | Results | list[Cell] | Progress]:
    """Load the models and measure all settings but those in `done`. Runs on a worker.

    Yields status lines, then results without cells, then the cells of each setting, and progress.
    """
    model = model_name(config.model)
    yield f"loading the model {model}"
    base, tokenizer = load_models(model, asdict(config.loading), threads)
    yield "timing steps, and decoding the prompts"
    evaluation = Evaluation(base, tokenizer, questions, _plan(config, questions))
    yield evaluation.describe(command, config.files)
    yield from evaluation.run(done)
