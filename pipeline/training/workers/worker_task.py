"""What the driver tells each training worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.training.texts.staged_texts import StagedTexts
from pipeline.training.train_config import TrainConfig
from pipeline.training.training_folder import TrainingFolder


@dataclass(frozen=True)
class WorkerTask:
    """The task of a worker; it is the same for all workers of a job.

    Args:
        config: The job's configuration.
        model: Hub id or folder of the base.
        base_fingerprints: Fingerprints of the base that generated the texts; see `same_base`.
        folder: The job's output.
        staged: The texts.
        provenance: How the head is trained. It is stored with the head.
        board: A `TrainingBoard` actor.
        threads: CPU threads of the worker.
    """

    config: TrainConfig
    model: str
    base_fingerprints: tuple[str, ...]
    folder: TrainingFolder
    staged: StagedTexts
    provenance: dict[str, Any]
    board: Any
    threads: int
