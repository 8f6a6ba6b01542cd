"""Distilled texts of the tiny model, and a way to train on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.distill import main as distill
from jobs.train import main
from tests.pipeline.conftest import JobRun, job_arguments, write_jsonl

SETTINGS = {
    "texts.held_out_texts": 6,
    "training.steps": 24,
    "training.texts_per_step": 4,
    "training.anchors_per_text": 6,
    "training.warmup_steps": 2,
    "training.evaluate_every": 12,
    "head": json.dumps({"num_frames": 5, "depth": 3, "num_heads": 2, "intermediate_size": 48, "draft_vocab_size": 64}),
    "log_every": 1,
    "checkpoint_every": 4,
}


@dataclass
class Training(JobRun):
    """Output of a training job."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of its metrics."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step; no step twice."""
        lines = [(record["step"], record["loss"]) for record in self.records if "loss" in record]
        assert len(dict(lines)) == len(lines)
        return dict(lines)

    @property
    def betas(self) -> dict[int, dict[str, float]]:
        """Held-out β by step and number of draft nodes."""
        return {record["step"]: record["beta"] for record in self.records if "beta" in record}

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that are kept."""
        return sorted(path.name for path in (self.folder / "_checkpoints").glob("step-*"))


Train = Callable[..., Training]


@pytest.fixture(scope="session")
def distilled(local_ray: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a distillation with the tiny model."""
    folder = tmp_path_factory.mktemp("distilled")
    prompts = [{"prompt": f"how many {'pens apples she does have'[n % 20 :]} {n}"} for n in range(40)]
    source = write_jsonl(folder / "prompts.jsonl", [*prompts, {"prompt": ""}])
    settings = ("--sampling.max_new_tokens", 14, "--writing.rows_per_file", 16)
    assert distill(job_arguments(source, folder / "out", model, *settings, drafter="none")) == 0
    return folder / "out"


def arguments_of(data: Any, output: Path, model: Path, **settings: Any) -> list[str]:
    """A command line; `settings` with `_` for `.` after the first word are given as `group__name`."""
    chosen = {"input": data, "output": output, "model": model, **SETTINGS}
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    return [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="session")
def unbroken(local_ray: None, model: Path, distilled: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """An undisturbed run of one worker; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("unbroken") / "trained"
    assert main(arguments_of(distilled, folder, model)) == 0
    return Training(0, "", "", folder)


@pytest.fixture
def train(local_ray: None, model: Path, distilled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Train:
    """Run the job in this process: `train(training__steps=5, output=…)`."""

    def job(data: Any = None, output: Path | None = None, base: Path | None = None, **settings: Any) -> Training:
        folder = output or tmp_path / "trained"
        capfd.readouterr()
        code = main(arguments_of(data or distilled, folder, base or model, **settings))
        printed = capfd.readouterr()
        return Training(code, printed.out, printed.err, folder)

    return job
