"""The settings `learning.*`: a head that learns from the rows while the job runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from drafter.learning.learner_settings import LearnerSettings
from pipeline.command_line import at_least
from pipeline.errors import InputError

SHIPPED, NEW = "shipped", "new"


@dataclass(frozen=True)
class LearningConfig:
    """A draft head that learns from the job's rows.

    Args:
        enabled: Whether a head learns; `--learning true` for short.
        head: What it begins as: a head's folder or hub id; `new`, which knows nothing; or `shipped`, the one that ships
            with the project for the base, and a new one where none does.
        algorithm: Kind of a new head.
        must_pay: Whether it learns only while that is expected to make the job shorter; otherwise it learns to the end.
        cpus: CPU cores that are the learner's own, and so its threads. With 0 it is one thread that takes what the
            engines leave.
        gpus: GPUs that are the learner's own, a fraction allowed; with 0 it learns on the CPU. Engines that are to
            share a GPU with it take less of it: see resources.gpus_per_actor.
        training: How it learns.
    """

    enabled: bool = False
    head: str = SHIPPED
    algorithm: Literal["ctc", "medusa", "hydra", "eagle3", "specformer"] = "ctc"
    must_pay: bool = True
    cpus: float = 0
    gpus: float = 0
    training: LearnerSettings = field(default_factory=LearnerSettings)

    def __post_init__(self) -> None:
        if not self.head.strip():
            raise InputError("learning.head is empty")
        at_least("learning.cpus", self.cpus, 0)
        at_least("learning.gpus", self.gpus, 0)
        if self.gpus > 1:
            raise InputError(f"learning.gpus must be at most 1, not {self.gpus:g}: a learner runs on one device")
