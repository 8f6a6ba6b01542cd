"""The jobs of a run, in order: each a command, and a file with its settings.

Every job is one that can be submitted again and goes on where it stopped. So the chain has to know only which of them
are done.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.command_line import JobParser, make_parser, parse_object
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.generate.config import GenerateConfig, generate_parser
from pipeline.training.config import TrainConfig
from recipes.paper.head_settings import head_settings
from recipes.paper.paper_config import PaperConfig

_OWN = {
    "generate": {"input", "output", "model", "reading"},
    "distill": {"input", "output", "model"},
    "train": {"input", "output", "model", "algorithm", "head"},
    "evaluate": {"output", "model", "drafter"},
}
"""Settings of each job that the recipe makes itself."""


@dataclass(frozen=True)
class Stage:
    """One job of the chain.

    Args:
        name: What it is called.
        command: What is submitted.
        settings: The job's settings; of a job of this recipe, those of the run's that it depends on.
        file: Where they are written for the job; None for a job of this recipe, which reads the run's own.
        after: Digests of the stages whose output it reads.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    file: Path | None
    after: str = ""

    @property
    def text(self) -> str:
        """The command and the settings, as they are written."""
        return f"# {shlex.join(self.command)}\n{yaml.safe_dump(dict(self.settings), sort_keys=False)}"

    @property
    def digest(self) -> str:
        """What decides whether a stage is done: its text and those of all stages before it, in sixteen digits.

        Settings name an input by its path alone. Without the stages before it, a stage would stay done when what it
        reads is made anew.
        """
        return hashlib.sha256(f"{self.after}\n{self.text}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Places:
    """Where a run keeps what."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def openings(self) -> Path:
        return self.folder / "openings.jsonl"

    @property
    def questions(self) -> Path:
        return self.folder / "questions"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        return self.folder / "answers"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    @property
    def run(self) -> Path:
        """The run's own settings, for the jobs of this recipe."""
        return self.folder / "jobs" / "run.yaml"

    def training(self, head: str) -> Path:
        """Return the output of a head's training."""
        return self.folder / "heads" / plain_name(head)

    def head(self, head: str) -> Path:
        """Return a trained head."""
        return self.training(head) / "head"


def plain_name(name: str) -> str:
    """Return a name without `+`, which in a drafter's name joins two drafters."""
    return name.replace("+", "-plus")


def stages(config: PaperConfig) -> list[Stage]:
    """Return the jobs of a run, checked as far as this can be done before the base is there.

    Raises:
        InputError: A job's settings cannot be used, or there is no such head.
    """
    places = Places(config.folder)
    measured = evaluation_of(config).files
    prepared = [_own(places, "base", asdict(config.base))]
    if config.prompts.written:
        prepared.append(_own(places, "openings", {"written": config.prompts.written}))
        reading = {"chat": False, "id_column": "number"}
        made = {"input": places.openings, "output": places.questions, "reading": reading}
        prepared.append(_job(places, "questions", "generate", config.questions, **made))
    prepared.append(_own(places, "prompts", {**asdict(config.prompts), "measured": measured}))
    prepared.append(_job(places, "answers", "distill", config.answers, input=places.prompts, output=places.answers))
    trained = []
    for name in config.heads:
        algorithm, head = head_settings(config, name)
        made = {"input": places.answers, "output": places.training(name), "algorithm": algorithm, "head": head}
        trained.append(_job(places, f"train-{plain_name(name)}", "train", config.training, **made))
    drafters = [str(places.head(name)) for name in config.heads]
    made = {"output": places.evaluation, "drafter": drafters}
    evaluate = _job(places, "evaluate", "evaluate", config.evaluation, **made)
    found: list[Stage] = []
    for stage in prepared:
        found.append(_following(found[-1:], stage))
    trained = [_following(found[-1:], stage) for stage in trained]
    return [*found, *trained, _following(trained, evaluate)]


def _following(before: Sequence[Stage], stage: Stage) -> Stage:
    """Return a stage that is done only as long as those before it, whose output it reads, are what they were."""
    return replace(stage, after=" ".join(one.digest for one in before))


def evaluation_of(config: PaperConfig) -> EvaluateConfig:
    """Return what is measured, with its defaults.

    Raises:
        InputError: Its settings cannot be used.
    """
    settings = {"output": str(config.folder), **config.evaluation}
    return parse_object(EvaluateConfig, _parser("evaluate"), settings)


def _own(places: Places, name: str, settings: Mapping[str, Any]) -> Stage:
    return Stage(name, ("python", "-m", "recipes.paper", name, "--config", str(places.run)), settings, None)


def _job(places: Places, name: str, job: str, settings: Mapping[str, Any], **made: Any) -> Stage:
    """Return a stage that is one of the project's jobs.

    Args:
        places: Where things are.
        name: What the stage is called.
        job: The job.
        settings: Those of its settings that the run's configuration gives.
        made: Those that the recipe makes.
    """
    if taken := _OWN[job] & settings.keys():
        raise InputError(f"settings of drafter {job} cannot have {min(taken)!r}: the recipe sets it")
    paths = {key: str(value) if isinstance(value, Path) else value for key, value in made.items()}
    merged = {**paths, "model": str(places.base), **settings}
    try:
        parse_object(_CONFIGS[job], _parser(job), merged)
    except InputError as error:
        raise InputError(f"stage {name}: {error}") from error
    file = places.folder / "jobs" / f"{name}.yaml"
    return Stage(name, ("python", "-m", f"jobs.{job}", "--config", str(file)), merged, file)


@cache
def _parser(job: str) -> JobParser:
    """Make a job's command line, which takes a tenth of a second, once."""
    if job in ("generate", "distill"):
        return generate_parser()
    return make_parser(_CONFIGS[job], job, "", "")


_CONFIGS: dict[str, type] = {
    "generate": GenerateConfig,
    "distill": GenerateConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
}
