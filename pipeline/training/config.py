"""Configuration and command line of the training job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.training.settings import TrainingSettings
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError


@dataclass(frozen=True)
class TextsConfig:
    """The texts to train on.

    Args:
        held_out: Output of another distillation to measure β on; by default some prompts of `input` are held out.
        held_out_texts: Texts that β is measured on; by default 64, or an eighth of fewer than 512 texts.
        max_length: Tokens of a text; longer texts are cut.
        store_hidden: Compute the target model's hidden states once and store them, after their size has been shown.
    """

    held_out: str | None = None
    held_out_texts: int | None = None
    max_length: int = 2_048
    store_hidden: bool = False

    def __post_init__(self) -> None:
        at_least("texts.held_out_texts", self.held_out_texts, 1)
        at_least("texts.max_length", self.max_length, 2)


@dataclass(frozen=True)
class ShardingConfig:
    """Division of a training step.

    Args:
        zero_stage: Partitioned among the workers, as in DeepSpeed: 0 nothing, 1 the optimiser's state, 2 also the
            gradients, 3 also the weights, the target model's included.
        micro_batches: Parts of a step whose gradients are accumulated, which takes less memory.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        at_least("sharding.micro_batches", self.micro_batches, 1)


@dataclass(frozen=True)
class WorkersConfig:
    """The job's share of the cluster, and the failures that it survives.

    Args:
        number: Workers, or the fewest and the most: as many as fit, while nodes come and go.
        gpus: GPUs of a worker; by default 1 where there are GPUs, otherwise 0.
        cpus: CPU cores of a worker, and so its threads; by default 1 beside a GPU, otherwise an even share of all but
            half a core.
        max_failures: How often training resumes after workers died. Preempted nodes do not count.
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
        return self.number if isinstance(self.number, int) else self.number[0]

    @property
    def most(self) -> int:
        return self.number if isinstance(self.number, int) else self.number[1]


@dataclass(frozen=True)
class TrainConfig:
    """A training job.

    Args:
        input: Output of `drafter distill`, or a list of such outputs.
        output: Folder or URI for the head. It is new, empty, or the output of an earlier submission of the same job.
        model: The target model that generated the texts, as a hub id or folder; by default the one that they name.
        trust_remote_code: Run modeling code that comes with the target model.
        algorithm: Kind of draft head: `ctc`, `medusa`, `hydra`, `eagle3`, `specformer` or `imitation`.
        head: Fields of the head's configuration, such as `{num_frames: 10, depth: 8}`. With `draft_vocab_size: 8192` it
            drafts only the 8,192 most frequent tokens of the answers, which is much cheaper if the target model's
            vocabulary is large.
        start: A trained head to go on from, its folder or hub id. It says what `algorithm` and `head` would.
        texts: Which texts the head learns from.
        training: How the head is trained.
        sharding: How a step is divided among workers.
        workers: How much of the cluster the job uses.
        export: `speculators` also writes the best head to `export/`, in the layout that vLLM reads: EAGLE-3 and Medusa.
        log_every: Steps between two lines of metrics.
        checkpoint_every: Steps between two checkpoints.
    """

    input: str | list[str]
    output: str
    model: str | None = None
    trust_remote_code: bool = False
    algorithm: str = "ctc"
    head: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    texts: TextsConfig = field(default_factory=TextsConfig)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    export: Literal["speculators"] | None = None
    log_every: int = 10
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if not self.folders or not all(folder.strip() for folder in self.folders):
            raise InputError("input is empty")
        if not self.output.strip():
            raise InputError("output is empty")
        if self.start is not None and self.head:
            raise InputError("start names a trained head, which has its own configuration: leave head out")
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
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def draft_vocab_size(self) -> int | None:
        """Number of tokens that the head may draft; None for all."""
        return self.head.get("draft_vocab_size")


_COMMON = (
    "input",
    "output",
    "model",
    "algorithm",
    "head",
    "start",
    "training.steps",
    "training.learning_rate",
    "training.warmup_steps",
    "training.texts_per_step",
    "training.precision",
    "training.seed",
    "texts.held_out",
    "texts.max_length",
    "texts.store_hidden",
    "workers.number",
    "workers.gpus",
    "workers.cpus",
    "sharding.zero_stage",
    "sharding.micro_batches",
    "export",
    "log_every",
    "checkpoint_every",
)
"""Settings that `--help` shows."""
_DESCRIPTION = """\
Train a draft head on its target model's own answers.

--input is the output of drafter distill. The job writes to --output: head/ (the head with the highest held-out β, for
--drafter of drafter generate), metrics.jsonl, tensorboard/ and run.json (what was run).
Submit the same command again to resume from the last checkpoint.

  drafter train --input distilled --output trained
  drafter train --input '[distilled, distilled-sampled]' --output trained --head '{label_context: 1}'
  drafter train --input distilled --output trained --model MODEL --workers.number 8 \\
      --sharding.zero_stage 2 --training.precision bf16
  drafter train --config examples/train.yaml"""


def parse_config(arguments: Sequence[str] | None = None) -> TrainConfig:
    parser = make_parser(TrainConfig, "train", "--input DIR --output DIR", _DESCRIPTION, _COMMON)
    return parse(TrainConfig, parser, arguments)
