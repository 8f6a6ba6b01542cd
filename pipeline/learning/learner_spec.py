"""Models and settings of a learner's process, and the initial head of engines and learner."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafter.errors import one_line
from drafter.methods.learning.settings import SHIPPED_OR_NEW, LearnerSettings, StartingHead
from pipeline.io.files import Location
from pipeline.learning.config import NEW, SHIPPED, LearningConfig
from pipeline.output.folder import HEAD_CONFIG, OutputFolder

HEAD_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Beginning:
    """The initial head, the same for all engines and the learner of a job.

    Args:
        saved: Folder of the head trained by an earlier submission; None if there is none.
    """

    start: StartingHead
    saved: Location | None = None

    def here(self, folder: str) -> StartingHead:
        """Return this process's initial head; `start` if a saved head cannot be read.

        Args:
            folder: Local folder into which a saved head is copied.
        """
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
    """Models and settings of a learner's process.

    Args:
        device: As in `load_base`. A GPU that is not its own belongs to engines, which count on all of its memory.
        yields: Whether these threads take only what other processes leave.
        shares: Whether engines also use the cores or the GPU.
        run: The name in metrics: a job's output, or an endpoint's model name.
    """

    model: str
    dtype: str
    device: str
    trust_remote_code: bool
    beginning: Beginning
    settings: LearnerSettings
    must_pay: bool
    threads: int
    yields: bool
    shares: bool
    output: OutputFolder
    run: str


def learner_spec(
    config: LearningConfig,
    begins: Beginning,
    output: OutputFolder,
    run: str,
    *,
    model: str,
    dtype: str,
    trust_remote_code: bool,
) -> LearnerSpec:
    return LearnerSpec(
        model=model,
        dtype=dtype,
        device="auto" if config.gpus else "cpu",
        trust_remote_code=trust_remote_code,
        beginning=begins,
        settings=config.training,
        must_pay=config.must_pay,
        threads=config.threads,
        yields=config.yields,
        shares=config.shares,
        output=output,
        run=run,
    )


def beginning(config: LearningConfig, output: OutputFolder) -> Beginning:
    """Return the initial head of a submission or an endpoint: the output's, if an earlier one has trained it."""
    folder = {SHIPPED: SHIPPED_OR_NEW, NEW: None}.get(config.head, config.head)
    start = StartingHead(folder, config.algorithm, seed=config.training.seed)
    return Beginning(start, output.head if _is_whole(output.head) else None)


def fetch_head(folder: Location, here: Path) -> None:
    """Copy a head's folder to this machine.

    Raises:
        OSError: It does not exist, or cannot be read.
    """
    for name in (HEAD_CONFIG, HEAD_WEIGHTS):
        (folder / name).copy_to(here / name)


def put_head(here: Path, folder: Location) -> None:
    """Copy a head's folder from this machine to the output; each file appears complete.

    Raises:
        OSError: It cannot be written.
    """
    folder.make_folder()
    for name in (HEAD_WEIGHTS, HEAD_CONFIG):  # without a config.json there is no head yet
        (folder / name).copy_from(here / name)


def _is_whole(folder: Location) -> bool:
    """Return whether there is a readable head. A damaged one costs its training, not the job."""
    if not any(info.base_name == HEAD_CONFIG for info in folder.children()):
        return False
    try:
        with tempfile.TemporaryDirectory() as name:
            here = Path(name)
            fetch_head(folder, here)
            config: Any = json.loads((here / HEAD_CONFIG).read_text(encoding="utf-8"))
            with safe_open(here / HEAD_WEIGHTS, framework="numpy") as file:
                return isinstance(config, dict) and bool(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        print(f"the head in {folder.path} is damaged, and learnt anew: {one_line(error)}", file=sys.stderr, flush=True)
        return False
