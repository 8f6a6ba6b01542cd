"""Settings `learning.*`: a head that learns from the rows while the job runs; and what its learner starts with."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.errors import one_line
from drafter.methods.learning.settings import SHIPPED_OR_NEW, LearnerSettings, StartingHead
from pipeline.command_line import at_least
from pipeline.errors import InputError
from pipeline.io.files import Location, local_path
from pipeline.output.folder import HEAD_CONFIG, OutputFolder, check_head, fetch_head

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
        """Raise `InputError` where the head would not draft, or the output would not be the target model's own."""
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


@dataclass(frozen=True)
class Beginning:
    """The initial head, the same for all engines and the learner of a job.

    `saved` is the folder of the head trained by an earlier submission; None if there is none.
    """

    start: StartingHead
    saved: Location | None = None

    def here(self, folder: str) -> StartingHead:
        """Return this process's initial head: a saved one, copied into a local `folder`, or `start`."""
        if self.saved is None:
            return self.start
        try:
            fetch_head(self.saved, Path(folder))
        except OSError as error:  # it costs drafts, and not the job
            print(f"{self.saved.path} cannot be read: {one_line(error)}", file=sys.stderr, flush=True)
            return self.start
        return replace(self.start, folder=folder, copied_from=self.saved.path)


@dataclass(frozen=True)
class LearnerSpec:
    """Models and settings of a learner's process. `run` is its name in metrics: an output, or an endpoint's model."""

    config: LearningConfig
    beginning: Beginning
    output: OutputFolder
    run: str
    model: str
    dtype: str
    trust_remote_code: bool

    @property
    def device(self) -> str:
        """As in `load_base`. A GPU that is not its own belongs to engines, which count on all of its memory."""
        return "auto" if self.config.gpus else "cpu"


def beginning(config: LearningConfig, output: OutputFolder) -> Beginning:
    """Return the initial head of a submission or an endpoint: the output's, if an earlier one has trained it."""
    folder = {SHIPPED: SHIPPED_OR_NEW, NEW: None}.get(config.head, local_path(config.head))
    start = StartingHead(folder, config.algorithm, seed=config.training.seed)
    return Beginning(start, output.head if _is_whole(output.head) else None)


def _is_whole(folder: Location) -> bool:
    """Return whether there is a readable head. A damaged one costs its training, not the job."""
    if not any(info.base_name == HEAD_CONFIG for info in folder.children()):
        return False
    try:
        check_head(folder)
    except (OSError, ValueError) as error:
        print(f"the head in {folder.path} is damaged, and learnt anew: {one_line(error)}", file=sys.stderr, flush=True)
        return False
    return True
