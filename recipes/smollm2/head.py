"""The stages `train` and `evaluate`: the draft head, and what it gains."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import ray

from pipeline.errors import InputError
from pipeline.evaluation.evaluate_config import parse_config as parse_evaluation
from pipeline.evaluation.evaluate_job import evaluate as run_evaluation
from pipeline.training.train_config import parse_config as parse_training
from pipeline.training.train_job import train as run_training
from recipes.smollm2.rounds import HERE, Round


def train(model: Path, output: Path, rounds: int, settings: Sequence[str]) -> None:
    """Train the head on the answers of the first rounds.

    Args:
        model: The model's folder.
        output: The folder of the rounds; the training's output is `training-ROUNDS` in it.
        rounds: How many rounds, all of which must be finished.
        settings: Settings of the job, as on its command line.

    Raises:
        InputError: A round is missing, a setting is wrong, or the output is of another job.
        JobError: The job failed on the way.
        JobStopped: The job was told to stop.
    """
    answers = [Round(number, output).answers for number in range(1, rounds + 1)]
    if missing := [str(one) for one in answers if not one.exists()]:
        raise InputError(f"there is no {missing[0]}: run the stage distil first, or name fewer --rounds")
    data = json.dumps([str(one) for one in answers])
    given = ["--data", data, "--output", str(_training(output, rounds)), "--model", str(model)]
    try:
        run_training(parse_training(["--config", str(HERE / "train.yaml"), *given, *settings]))
    finally:
        ray.shutdown()


def evaluate(model: Path, output: Path, rounds: int, settings: Sequence[str]) -> None:
    """Measure the head that `train` has made; the results are `evaluation-ROUNDS` in the output.

    Args:
        model: The model's folder.
        output: The folder of the rounds and of the training.
        rounds: How many rounds the head has learned from.
        settings: Settings of the job, as on its command line.

    Raises:
        InputError: There is no head, or a setting is wrong.
        JobError: The job failed on the way.
    """
    head = _training(output, rounds) / "head"
    if not head.exists():
        raise InputError(f"there is no {head}: run the stage train first")
    given = ["--output", str(output / f"evaluation-{rounds}"), "--model", str(model), "--drafters", str(head)]
    given = ["--config", str(HERE / "evaluate.yaml"), *given, *settings]
    try:
        run_evaluation(parse_evaluation(given), shlex.join(["python", "-m", "jobs.evaluate", *given]))
    finally:
        ray.shutdown()


def _training(output: Path, rounds: int) -> Path:
    """The output of a training: another number of rounds is another training."""
    return output / f"training-{rounds}"
