"""The configuration of a training job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from drafter.training.settings import TrainingSettings
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError


@dataclass(frozen=True)
class TextsConfig:
    """Which texts the head sees.

    Args:
        held_out: Output of another distillation to measure β on; by default some prompts of `data` are kept back.
        held_out_texts: Texts that β is measured on.
        max_length: Longer texts are cut to so many tokens.
        store_hidden: Compute the base's hidden states once and keep them on disk, instead of anew in each step. Their
            size is said before that begins.
    """

    held_out: str | None = None
    held_out_texts: int = 64
    max_length: int = 2_048
    store_hidden: bool = False

    def __post_init__(self) -> None:
        at_least("texts.held_out_texts", self.held_out_texts, 1)
        at_least("texts.max_length", self.max_length, 2)


@dataclass(frozen=True)
class ShardingConfig:
    """How a step is divided.

    Args:
        zero_stage: What the workers share out among them, as in DeepSpeed: 0 nothing, 1 the optimiser's state, 2 the
            gradients too, 3 the weights too, the base's included.
        micro_batches: Parts of a step whose gradients are added up one after the other, to need less memory.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        at_least("sharding.micro_batches", self.micro_batches, 1)


@dataclass(frozen=True)
class WorkersConfig:
    """What of the cluster the job takes, and what happens when a part of it fails.

    Args:
        number: Workers, or the fewest and the most: as many as there is room for, more or fewer as nodes come and go.
        gpus: GPUs of a worker; by default 1 where there are GPUs, otherwise 0.
        cpus: CPU cores of a worker, and so its threads; by default 1 beside a GPU, otherwise an even share of all but
            half a core.
        max_failures: How often training is taken up again from the last checkpoint after workers died; nodes taken
            away by their owner do not count.
    """

    number: int | tuple[int, int] = 1
    gpus: float | None = None
    cpus: float | None = None
    max_failures: int = 3

    def __post_init__(self) -> None:
        at_least("workers.number", self.fewest, 1)
        if self.most < self.fewest:
            raise InputError(f"workers.number must be the fewest and the most workers, not {list(self.number)}")  # type: ignore[arg-type]
        at_least("workers.gpus", self.gpus, 0)
        at_least("workers.cpus", self.cpus, 0, above=True)
        at_least("workers.max_failures", self.max_failures, 0)

    @property
    def fewest(self) -> int:
        """Workers that there must be."""
        return self.number if isinstance(self.number, int) else self.number[0]

    @property
    def most(self) -> int:
        """Workers that there may be."""
        return self.number if isinstance(self.number, int) else self.number[1]


@dataclass(frozen=True)
class TrainConfig:
    """A training job.

    Args:
        data: Output of `jobs.distill`, or a list of such outputs.
        output: Folder or URI for the head; new, empty, or of an earlier submission of the same job.
        model: The base that said the texts: hub id or folder; by default the embedded demonstration model.
        trust_remote_code: Run modeling code that comes with the base.
        algorithm: Kind of draft head: `ctc`, `medusa` or `hydra`.
        head: Fields of the head's configuration to set, such as `{num_frames: 10, depth: 8}`.
        texts: Which texts the head sees.
        training: How it learns.
        sharding: How a step is divided.
        workers: What of the cluster the job takes.
        log_every: Steps between lines of metrics.
        checkpoint_every: Steps between checkpoints.
    """

    data: str | list[str]
    output: str
    model: str | None = None
    trust_remote_code: bool = False
    algorithm: str = "ctc"
    head: dict[str, Any] = field(default_factory=dict)
    texts: TextsConfig = field(default_factory=TextsConfig)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    log_every: int = 10
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if not self.folders or not all(folder.strip() for folder in self.folders):
            raise InputError("data is empty")
        if not self.output.strip():
            raise InputError("output is empty")
        at_least("log_every", self.log_every, 1)
        at_least("checkpoint_every", self.checkpoint_every, 1)
        shares = self.workers.most * self.sharding.micro_batches
        if self.training.texts_per_step < shares:
            raise InputError(
                f"training.texts_per_step must be at least {shares}, one text for each of {self.workers.most} workers "
                f"in each of {self.sharding.micro_batches} micro-batches, not {self.training.texts_per_step}"
            )

    @property
    def folders(self) -> list[str]:
        """All of `data`."""
        return [self.data] if isinstance(self.data, str) else list(self.data)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        values = dataclasses.asdict(self)
        if not isinstance(self.workers.number, int):
            values["workers"]["number"] = list(self.workers.number)
        return values

    def as_yaml(self) -> str:
        """The configuration as a file that `--config` takes."""
        return str(yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True))


_DESCRIPTION = """\
Train a draft head on what its base answered.

--data is the output of jobs.distill. Into --output go head/ (the head with the highest held-out β, for
--drafter of jobs.generate), metrics.jsonl, tensorboard/, training.png and run.json (what was run).
Submitting the same command again goes on from the last checkpoint.

  python -m jobs.train --data distilled --output trained
  python -m jobs.train --data '[distilled, distilled-sampled]' --output trained --head '{label_context: 1}'
  python -m jobs.train --data distilled --output trained --model MODEL --workers.number 8 \\
      --sharding.zero_stage 2 --training.precision bf16
  python -m jobs.train --config examples/train.yaml"""


def parse_config(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The training job that a command line asks for; see `command_line.parse`."""
    return parse(
        TrainConfig, make_parser(TrainConfig, "jobs.train", "--data DIR --output DIR", _DESCRIPTION), arguments
    )
