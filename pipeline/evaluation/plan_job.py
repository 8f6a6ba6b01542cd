"""Entry of the planning job: one Ray task measures the drafters and plans the best stack of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafter.drafters.registry import useful_nodes
from drafter.errors import LoadError, RequestError
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import Question, QuestionError, prompts_of, read_questions
from drafter.methods.draft_models.measurement import (
    Comparison,
    StackPlanning,
    acceptance_table,
    stack_name,
    stack_table,
    write_stacks,
)
from drafter.target.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.engines.models import head_fingerprints, model_name
from pipeline.errors import InputError
from pipeline.evaluation.config import PlanConfig
from pipeline.evaluation.measuring import measured
from pipeline.settings import ResourcesConfig


def plan(config: PlanConfig, command: str) -> None:
    """Run a job to its end; `command` is kept for the record.

    Raises:
        InputError: The configuration, the questions, the models or the output cannot be used.
        JobError: The job failed on the way.
    """
    try:
        questions = read_questions(config.questions, config.questions_per_file)
    except QuestionError as error:
        raise InputError(str(error)) from error
    if len(questions) < 2:
        raise InputError(
            f"questions {config.questions}: a plan needs at least 2, one to measure on and one to try it on"
        )
    for name in config.drafters:
        head_fingerprints(config.model, name)  # check names before anything is loaded
    folder = Path(config.output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error.strerror or error}") from error
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="planning", settings="{}")
    found: tuple[Comparison, dict[str, Any]] | None = None
    asked = (config, questions, command, resources.threads)
    for item in measured(resources, measure_stacks, *asked, mistakes=(LoadError, QuestionError, RequestError)):
        if isinstance(item, str):
            print(item, file=sys.stderr, flush=True)
        else:
            found = item
    assert found is not None
    comparison, where = found
    files = write_stacks(comparison, where, folder)
    print(f"{acceptance_table(comparison)}\n\n{stack_table(comparison)}\n")
    print(f"best:     --drafter '{stack_name(comparison.expected[0].levels)}'")
    print("written:  " + ", ".join(map(str, files)), flush=True)


def measure_stacks(
    config: PlanConfig, questions: Sequence[Question], command: str, threads: int
) -> Iterator[str | tuple[Comparison, dict[str, Any]]]:
    """Load the models and measure; yield status lines, then the result and its environment.

    Raises:
        LoadError: A model cannot be loaded.
        QuestionError: The questions do not fit the target model.
    """
    torch.set_num_threads(threads)
    model = model_name(config.model)
    base = load_base(model, **asdict(config.loading))
    tokenizer = load_tokenizer(model, trust_remote_code=config.loading.trust_remote_code)
    nodes = config.num_draft_tokens or useful_nodes(base.device)
    planning = StackPlanning(base, tokenizer, config.drafters, nodes, config.batch)
    prompts, held_out = (
        prompts_of(
            base,
            tokenizer,
            some,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            slots=config.batch,
        )
        for some in (questions[::2], questions[1::2])
    )
    yield f"{len(prompts)} prompts, and {len(held_out)} others to try the plan on"
    comparison = yield from planning.run(prompts, held_out)
    yield comparison, environment(base, command)
