"""Settings `learning.*`: a head that learns from the rows while the job runs; and what its learner starts with.

The method may be away: it is imported where learning is asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.errors import one_line
from drafter.plugins import methods, registered
from pipeline.command_line import at_least
from pipeline.errors import InputError
from pipeline.io.files import Location, local_path
from pipeline.output.folder import HEAD_CONFIG, OutputFolder, check_head, fetch_head
from pipeline.settings import LoadingConfig

if TYPE_CHECKING:
    from drafter.methods.learning.settings import LearnerSettings, StartingHead

_SHIPPED, _NEW = "shipped", "new"


@dataclass(frozen=True)
class LearningConfig:
    """A draft head that learns from the job's rows.

    Args:
        enabled: Train a head; `--learning true` for short.
        head: Initial head: a head's folder or hub id; `new`, untrained, or `new:KIND`, of another kind than `ctc`; or
            `shipped`, the one that ships with the project for the target model, and a new one where none does.
        share: Share of the time for which the learner trains, at most 1.
        gpus: GPUs of the learner, a fraction allowed; with 0 it is a thread of the lowest priority on the CPU. Engines
            that are to share a GPU with it take less of it: see resources.gpus_per_actor, and replicas.gpus of an
            endpoint.
    """

    enabled: bool = False
    head: str = _SHIPPED
    share: float = 0.1
    gpus: float = 0

    def __post_init__(self) -> None:
        if not self.head.strip():
            raise InputError("learning.head is empty")
        at_least("learning.share", self.share, 0, above=True)
        at_least("learning.gpus", self.gpus, 0)
        if self.share > 1:
            raise InputError(f"learning.share must be at most 1, not {self.share:g}")
        if self.gpus > 1:
            raise InputError(f"learning.gpus must be at most 1, not {self.gpus:g}: a learner runs on one device")

    @property
    def given_head(self) -> str | None:
        """The head that the setting names; None for `shipped` and new ones."""
        return None if self.head == _SHIPPED or self.new_kind is not None else self.head

    @property
    def new_kind(self) -> str | None:
        """The kind of a head that starts from nothing; None if another one is asked for."""
        new, _, kind = self.head.partition(":")
        return (kind or "ctc") if new == _NEW else None

    def check_beside(self, drafter: str, verifier: VerifierSettings, engine: EngineSettings) -> None:
        """Raise `InputError` where the head would not draft, or the output would not be the target model's own."""
        if not self.enabled:
            return
        if "learning" not in methods():
            raise InputError("learning.enabled: this installation is without the method learning")
        kinds = ["ctc", *registered("heads")]
        if self.new_kind not in (None, *kinds):
            raise InputError(f"learning.head {self.head} is not known: new heads are of the kinds {', '.join(kinds)}")
        if drafter != "auto" and drafter != self.given_head:
            raise InputError(
                f"drafter {drafter} has no head that could learn: use auto, or give the same head as drafter and "
                "as learning.head"
            )
        if verifier.name != "exact":
            raise InputError(
                f"a head learns from what its target model says itself, and the verifier {verifier.name} lets other "
                "tokens pass: use exact, or do without learning"
            )
        if engine.tensor_parallel_size > 1:
            raise InputError(
                "learning.enabled and engine.tensor_parallel_size do not go together: leave one of them out"
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
    training: LearnerSettings
    beginning: Beginning
    output: OutputFolder
    run: str
    model: str
    loading: LoadingConfig

    @property
    def device(self) -> str:
        """As in `load_base`. A GPU that is not its own belongs to engines, which count on all of its memory."""
        return "auto" if self.config.gpus else "cpu"


def learner_spec(
    config: LearningConfig, output: OutputFolder, run: str, model: str, loading: LoadingConfig
) -> LearnerSpec:
    """Return the learner of a submission or an endpoint. It begins with the output's head, if there is one already."""
    from drafter.methods.learning.settings import LearnerSettings

    started = beginning(config, output)
    adapter = None if loading.adapter is None else local_path(loading.adapter)  # it works in another folder
    loading = replace(loading, adapter=adapter)
    return LearnerSpec(config, LearnerSettings(), started, output, run, model, loading)


def beginning(config: LearningConfig, output: OutputFolder) -> Beginning:
    """Return the initial head of a submission or an endpoint: the output's, if an earlier one has trained it."""
    from drafter.methods.learning.settings import SHIPPED_OR_NEW, StartingHead

    kind, given = config.new_kind, config.given_head
    if kind is not None:
        start = StartingHead(algorithm=kind)
    else:
        start = StartingHead(SHIPPED_OR_NEW if given is None else local_path(given))
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
