"""The stages `train`, `evaluate` and `ship`: the draft head, what it gains, and where it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import ray

from drafter.embedded import OTHER_HEADS
from drafter.target_model.loading import load_base
from pipeline.command_line import command_of
from pipeline.errors import InputError
from pipeline.evaluation.config import parse_config as parse_evaluation
from pipeline.evaluation.evaluate_job import evaluate as run_evaluation
from pipeline.training.config import parse_config as parse_training
from pipeline.training.job import train as run_training
from recipes.shipping import ship as ship_head
from recipes.smollm2.fetch import NAME
from recipes.smollm2.rounds import HERE, Round

SHIPPED = OTHER_HEADS / "smollm2-135m-instruct"
"""Where the drafter `auto` finds the head."""


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
    given = ["--input", data, "--output", str(_training(output, rounds)), "--model", str(model)]
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
    head = _trained(output, rounds)
    given = ["--output", str(output / f"evaluation-{rounds}"), "--model", str(model), "--drafter", str(head)]
    given = ["--config", str(HERE / "evaluate.yaml"), *given, *settings]
    try:
        run_evaluation(parse_evaluation(given), command_of("evaluate", given))
    finally:
        ray.shutdown()


def ship(model: Path, output: Path, rounds: int) -> None:
    """Put the head that `train` has made where the drafter `auto` finds it.

    Args:
        model: The model's folder.
        output: The folder of the rounds and of the training.
        rounds: How many rounds the head has learned from.

    Raises:
        InputError: There is no head.
        LoadError: It was trained for another model.
    """
    ship_head(_trained(output, rounds), load_base(model), NAME, SHIPPED)


def _trained(output: Path, rounds: int) -> Path:
    head = _training(output, rounds) / "head"
    if not head.exists():
        raise InputError(f"there is no {head}: run the stage train first")
    return head


def _training(output: Path, rounds: int) -> Path:
    """The output of a training: another number of rounds is another training."""
    return output / f"training-{rounds}"
