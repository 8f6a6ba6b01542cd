"""Settings `learning.*`: a head that learns from the rows while the job runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.methods.learning.settings import LearnerSettings
from pipeline.command_line import at_least
from pipeline.errors import InputError

SHIPPED, NEW = "shipped", "new"


@dataclass(frozen=True)
class LearningConfig:
    """A draft head that learns from the job's rows.

    Args:
        enabled: Train a head; `--learning true` for short.
        head: Initial head: a head's folder or hub id; `new`, untrained; or `shipped`, the one that ships with the
            project for the target model, and a new one where none does.
        algorithm: Kind of a new head.
        must_pay: Learn only while that is expected to make the job shorter; otherwise learn to the end.
        cpus: CPU cores of the learner alone, and so its threads. With 0 it is one thread that takes what the engines
            leave.
        gpus: GPUs of the learner alone, a fraction allowed; with 0 it learns on the CPU. Engines that are to share a
            GPU with it take less of it: see resources.gpus_per_actor, and replicas.gpus of an endpoint.
        training: Training settings.
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

    @property
    def threads(self) -> int:
        return max(1, math.ceil(self.cpus))

    @property
    def yields(self) -> bool:
        """True if the learner's threads take only what other processes leave."""
        return not self.cpus and not self.gpus

    @property
    def shares(self) -> bool:
        """True if engines also use the learner's cores or its GPU."""
        return self.yields or 0 < self.gpus < 1

    def check_beside(self, drafter: str, verifier: VerifierSettings, engine: EngineSettings) -> None:
        """Refuse learning where nothing would draft with the head.

        Args:
            drafter: The drafter's name.
            verifier: The verifier's settings.
            engine: The engine's sizes.

        Raises:
            InputError: The head has no part in the drafter, the output would not be the target model's own, or nothing
                is drafted.
        """
        if not self.enabled:
            return
        given = self.head not in (SHIPPED, NEW)
        if drafter != "auto" and not (given and drafter == self.head):
            raise InputError(
                f"drafter {drafter} has no head that could learn: use auto, or give the same head as drafter and "
                "as learning.head"
            )
        if verifier.name != "exact":
            raise InputError(
                f"a head learns from what its target model says itself, and the verifier {verifier.name} lets other "
                "tokens pass: use exact, or do without learning"
            )
        if engine.num_draft_tokens == 0:
            raise InputError("a head that learns is to draft: engine.num_draft_tokens 0 drafts nothing")
