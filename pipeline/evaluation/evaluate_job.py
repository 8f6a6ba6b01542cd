"""The evaluation job, of drafters or of verifiers: everything is measured side by side, on a GPU if there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any

from drafter.acceptance.contract import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError, RequestError
from drafter.evaluation.decoders import room_for
from drafter.evaluation.measurement import Evaluation, Progress, VerifierTrials
from drafter.evaluation.questions import Question, QuestionError, encode, read_questions
from drafter.evaluation.results import (
    RESULTS_FILE,
    Cell,
    Nodes,
    Plan,
    Results,
    Setting,
    figures,
    write_json,
)
from drafter.evaluation.tables import speed_tables, with_interval, write_report
from drafter.evaluation.verifiers import VerifierFigures, title_of, utility_table
from drafter.requests import Request, SamplingParams
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources, connect, share_out
from pipeline.command_line import say
from pipeline.engines.models import (
    model_name,
)
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import Ask, ScoredVerifiers, as_job_errors, load_models, measured, measuring
from pipeline.report.scorers import Scorer, make_scorer
from pipeline.settings import ResourcesConfig

VERIFIERS_FILE = "verifiers.json"
_LINE_SECONDS = 5.0

Questions = Mapping[str, Sequence[Question]]


def evaluate(config: EvaluateConfig, command: str) -> None:
    """Run an evaluation to its end; `command` is kept for the record. Results are written as they arrive.

    Raises `InputError` if the questions, the models or the output cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions = {name: read_questions(file, config.questions_per_file) for name, file in config.files.items()}
    folder = output_folder(config.output)
    earlier = _earlier_results(folder)
    if config.verifier is not None and earlier is not None:
        raise _unusable(folder, "holds an evaluation of drafters")
    if (folder / VERIFIERS_FILE).exists():
        raise _unusable(folder, "holds an evaluation of verifiers")
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="evaluation", settings="{}")
    if config.verifier is None:
        evaluate_drafters(config, questions, command, folder, resources, earlier)
    else:
        evaluate_verifiers(config, questions, command, folder, resources)


def output_folder(output: str) -> Path:
    folder = Path(output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _unusable(folder: Path, why: str) -> InputError:
    return InputError(f"output {folder} {why}: choose another")


# Drafters.


def evaluate_drafters(
    config: EvaluateConfig,
    questions: Questions,
    command: str,
    folder: Path,
    resources: ActorResources,
    earlier: Results | None,
) -> None:
    """Measure all settings except those of `earlier` results, and write the report."""
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


# Verifiers.


@dataclass(frozen=True)
class Block:
    """A combination of settings under which all verifiers are compared."""

    questions: str
    drafter: str
    nodes: Nodes
    batch: int
    temperature: float

    @property
    def title(self) -> str:
        return (
            f"{self.questions}, {self.drafter}, {self.nodes} draft nodes, batch {self.batch}, "
            f"temperature {self.temperature:g}"
        )


def evaluate_verifiers(
    config: EvaluateConfig, questions: Questions, command: str, folder: Path, resources: ActorResources
) -> None:
    """Measure all blocks, one after another.

    Raises `InputError` if questions, models, verifiers or the output cannot be used, and `JobError` on failure.
    """
    assert config.scorer is not None
    scorer, model = make_scorer(config.scorer, config.target), model_name(config.model)
    with as_job_errors((LoadError,)):
        for one in config.lenient_verifiers():
            make_verifier(one)
    plan = _plan(config, questions)
    for name, some in questions.items():
        if more := [question.name for question in some if len(question.turns) > 1]:
            raise InputError(
                f"questions {name}: {more[0]} has several turns, and a scorer scores one answer: leave it out"
            )
    settings = product(questions, plan.drafters, plan.num_draft_tokens, plan.batches, plan.temperatures)
    load = partial(load_models, model, asdict(config.loading), resources.threads, os.getcwd())
    with measuring(resources, VerifierTrials, load, mistakes=(LoadError, RequestError)) as ask:
        results: dict[str, Any] = {"environment": ask("load", command), "blocks": []}
        for block in (Block(*one) for one in settings):
            say(block.title)
            left_out, found = _measured(config, block, questions[block.questions], scorer, ask)
            figures = [one.as_dict() for one in found]
            results["blocks"].append({"block": asdict(block), "left_out": left_out, "verifiers": figures})
            write_json(folder / VERIFIERS_FILE, results)
            print(f"## {block.title}\n\n{utility_table(found)}\n")
            print(f"written:  {folder / VERIFIERS_FILE}", flush=True)


def _measured(
    config: EvaluateConfig, block: Block, questions: Sequence[Question], scorer: Scorer, ask: Ask
) -> tuple[list[str], list[VerifierFigures]]:
    """Return why verifiers are left out, and the figures of exact decoding and of the others."""
    verifiers: list[VerifierSettings] = []
    left_out: list[str] = []
    for one in config.lenient_verifiers():
        try:
            make_verifier(one).refuse(SamplingParams(temperature=block.temperature))
        except RequestError as error:
            left_out.append(str(error))
            say(f"left out at temperature {block.temperature:g}: {error}")
        else:
            verifiers.append(one)
    with as_job_errors((LoadError, RequestError)):
        tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.loading.trust_remote_code)
        requests = [
            Request(
                encode(tokenizer, [{"role": "user", "content": question.turns[0]}]),
                SamplingParams(config.max_new_tokens, block.temperature, seed=number),
                question.name,
            )
            for number, question in enumerate(questions)
        ]
    engine = room_for(requests, block.batch, num_draft_tokens=block.nodes, compile=config.compile)
    ask("begin", block.drafter, engine, requests, config.rounds)
    scored = ScoredVerifiers(ask, [{**one.columns, "request_id": one.name} for one in questions], scorer)

    def measure(settings: VerifierSettings) -> VerifierFigures:
        found = scored.measure(settings)
        kept = "" if found.kept is None else f", keeps {found.kept:.1%}"
        say(f"{title_of(settings)}: β {found.beta:.2f}{kept}")
        return found

    return left_out, [scored.exact, *map(measure, verifiers)]
