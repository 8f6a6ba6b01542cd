"""Entry of a training worker. It is a module of its own so that the driver does not import DeepSpeed."""

from __future__ import annotations

from typing import Any

import ray
import ray.train

from pipeline.training.board import refusals
from pipeline.training.worker import WorkerTask


def train_worker(loop_config: dict[str, Any]) -> None:
    """Train as `loop_config["task"]`, a `WorkerTask`, says."""
    task: WorkerTask = loop_config["task"]
    if ray.get(task.board.refusal.remote()) is not None:
        return  # Ray Train has restarted the worker after an error that would come again.
    try:
        with refusals(task.board):
            from pipeline.training.worker import run

            run(task)
    except Exception:
        # After an error Ray Train would start the worker again, which takes long, for the same refusal. Where there are
        # several, the error is needed, because the others wait for this one.
        if ray.train.get_context().get_world_size() > 1 or ray.get(task.board.refusal.remote()) is None:
            raise
