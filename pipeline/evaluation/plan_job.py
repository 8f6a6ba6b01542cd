"""Entry of the planning job: one Ray task measures drafters and plans the best stack of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drafter.drafters.registry import useful_nodes
from drafter.errors import LoadError, RequestError
from drafter.evaluation.questions import Question, QuestionError, prompts_of, read_questions
from drafter.methods.draft_models.planning import Cost, compare_stacks, measure_levels, stack_name, stack_table
from pipeline.cluster.ray_cluster import connect, share_out
from pipeline.engines.models import head_fingerprints, model_name
from pipeline.evaluation.config import PlanConfig
from pipeline.evaluation.measuring import as_job_errors, load_models, measured
from pipeline.settings import ResourcesConfig


def plan(config: PlanConfig) -> None:
    """Print the plan.

    Raises `InputError` if the questions or the models cannot be used, and `JobError` on failure.
    """
    with as_job_errors((QuestionError,)):
        questions = read_questions(config.input, config.questions_per_file)
    for name in config.drafters:
        head_fingerprints(config.model, name)  # check names before anything is loaded
    resources = share_out(ResourcesConfig(gpus_per_actor=config.gpus), connect(), what="planning", settings="{}")
    mistakes = (LoadError, QuestionError, RequestError)
    asked = (config, questions, resources.threads)
    ((expected, found),) = measured(resources, _measure, *asked, mistakes=mistakes)
    print(f"{stack_table(expected, found)}\n\nbest:     --drafter '{stack_name(expected[0].levels)}'", flush=True)


def _measure(
    config: PlanConfig, questions: Sequence[Question], threads: int
) -> Iterator[tuple[list[Cost], list[Cost]]]:
    """Yield what is expected of stacks, best first, and what was measured of some. Runs on a worker."""
    base, tokenizer = load_models(model_name(config.model), asdict(config.loading), threads)
    sampling: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    prompts = prompts_of(base, tokenizer, questions, slots=config.batch, **sampling)
    nodes = config.num_draft_tokens or useful_nodes(base.device)
    requests = [prompt.request for prompt in prompts]
    levels, found = measure_levels(base, tokenizer, config.drafters, nodes, requests, config.batch)
    yield compare_stacks(levels), found
