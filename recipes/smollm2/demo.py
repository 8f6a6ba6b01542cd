"""The stage `demo`: the main job on the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.generate.config import parse_config
from pipeline.generate.job import generate
from recipes.smollm2.rounds import HERE


def demo(model: Path, settings: Sequence[str]) -> None:
    """Answer GSM8K questions as `demo.yaml` says.

    Args:
        model: The model's folder.
        settings: Settings of the job, as on its command line.

    Raises:
        InputError: A setting is wrong.
        JobError: The job failed on the way.
        JobStopped: The job was told to stop.
    """
    generate(parse_config(["--config", str(HERE / "demo.yaml"), "--model", str(model), *settings]))
