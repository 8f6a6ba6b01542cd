"""The stage `distil`: rounds of questions and answers, by the project's own jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import ray

from pipeline.generate.config import GenerateConfig, parse_config, parse_distill_config
from pipeline.generate.job import generate
from recipes.smollm2.rounds import HERE, Round, write_openings, write_prompts


def distil(model: Path, output: Path, rounds: int, settings: Sequence[str]) -> None:
    """Make every round that is not finished.

    Args:
        model: The model's folder.
        output: The folder of the rounds.
        rounds: How many there are to be in all.
        settings: Settings of the jobs, as on their command lines.

    Raises:
        InputError: A setting is wrong, or a round was made with another model.
        JobError: A job failed on the way.
        JobStopped: A job was told to stop.
    """
    for number in range(1, rounds + 1):
        one = Round(number, output)
        if not one.openings.exists():
            write_openings(one, model)
        if not one.prompts.exists():
            _run(parse_config, "questions.yaml", one.openings, one.questions, model, settings)
            write_prompts(one)
        _run(parse_distill_config, "answers.yaml", one.prompts, one.answers, model, settings)


def _run(
    parse: Callable[[Sequence[str]], GenerateConfig],
    config: str,
    source: Path,
    output: Path,
    model: Path,
    settings: Sequence[str],
) -> None:
    paths = ["--input", str(source), "--output", str(output), "--model", str(model)]
    try:
        generate(parse(["--config", str(HERE / config), *paths, *settings]))
    finally:
        ray.shutdown()  # the next job takes its own share of the machine
