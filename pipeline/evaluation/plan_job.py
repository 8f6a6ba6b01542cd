"""Entry of the planning job: one Ray task measures drafters and plans the best stack of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drafter.drafters.registry import useful_nodes
from drafter.errors import LoadError, RequestError
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import Question, QuestionError, prompts_of, read_questions
from drafter.methods.draft_models.planning import (
    Comparison,
    StackPlanning,
    acceptance_table,
    stack_name,
    stack_table,
    write_stacks,
)
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.command_line import say
from pipeline.engines.models import head_fingerprints, model_name
from pipeline.errors import InputError
from pipeline.evaluation.config import PlanConfig
from pipeline.evaluation.evaluate_job import output_folder
from pipeline.evaluation.measuring import as_job_errors, load_models, measured
from pipeline.settings import ResourcesConfig


def plan(config: PlanConfig, command: str) -> None:
    """Run a planning job to its end; `command` is kept for the record.

    Raises `InputError` if the questions, the models or the output cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions = read_questions(config.input, config.questions_per_file)
    if len(questions) < 2:
        raise InputError(f"input {config.input}: a plan needs at least 2, one to measure on and one to try it on")
    for name in config.drafters:
        head_fingerprints(config.model, name)  # check names before anything is loaded
    folder = output_folder(config.output)
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="planning", settings="{}")
    asked = (config, questions, command, resources.threads)
    mistakes = (LoadError, QuestionError, RequestError)
    for item in measured(resources, _measure_stacks, *asked, mistakes=mistakes):
        if isinstance(item, str):
            say(item)
        else:
            comparison, where = item
    files = write_stacks(comparison, where, folder)
    print(f"{acceptance_table(comparison)}\n\n{stack_table(comparison)}\n")
    print(f"best:     --drafter '{stack_name(comparison.expected[0].levels)}'")
    print("written:  " + ", ".join(map(str, files)), flush=True)


def _measure_stacks(
    config: PlanConfig, questions: Sequence[Question], command: str, threads: int
) -> Iterator[str | tuple[Comparison, dict[str, Any]]]:
    """Load the models and measure. Runs on a worker; yields status lines, then the result and its environment."""
    base, tokenizer = load_models(model_name(config.model), asdict(config.loading), threads)
    nodes = config.num_draft_tokens or useful_nodes(base.device)
    planning = StackPlanning(base, tokenizer, config.drafters, nodes, config.batch)
    sampling: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    prompts, held_out = (
        prompts_of(base, tokenizer, some, slots=config.batch, **sampling) for some in (questions[::2], questions[1::2])
    )
    yield f"{len(prompts)} prompts, and {len(held_out)} others to try the plan on"
    comparison = yield from planning.run(prompts, held_out)
    yield comparison, environment(base, command)
