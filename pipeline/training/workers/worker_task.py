"""What Ray Train runs on each worker. It stands apart so that the driver need not load DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from pipeline.training.texts.staged_texts import StagedTexts
from pipeline.training.train_config import TrainConfig
from pipeline.training.training_board import refusals
from pipeline.training.training_folder import TrainingFolder


@dataclass(frozen=True)
class WorkerTask:
    """What a worker needs to know.

    Args:
        config: The job's configuration.
        model: Hub id or folder of the base.
        base_fingerprint: Of the base that said the texts.
        folder: The job's output.
        staged: The texts.
        provenance: Goes into the head's configuration: how it was trained.
        board: A `TrainingBoard` actor.
        threads: CPU threads.
    """

    config: TrainConfig
    model: str
    base_fingerprint: str
    folder: TrainingFolder
    staged: StagedTexts
    provenance: dict[str, Any]
    board: Any
    threads: int


def train_worker(loop_config: dict[str, Any]) -> None:
    """Ray Train's training function; `loop_config` holds a `WorkerTask` as `task`."""
    task: WorkerTask = loop_config["task"]
    if ray.get(task.board.refusal.remote()) is not None:
        return  # tried again after an error that would come again
    with refusals(task.board):
        from pipeline.training.workers.training_worker import run

        run(task)
