"""The configuration of the recipe: a base, its prompts, the heads, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError
from recipes.paper.base_sizes import BaseSizes

HERE = Path(__file__).parent
RANDOM, SMOLLM2 = "random", "smollm2"
"""Sources of a base that are neither a folder nor a hub id."""


@dataclass(frozen=True)
class BaseConfig:
    """The base, and its sizes, so that everything can be checked before anything is fetched.

    Args:
        name: What it is called, in the table and among the published figures.
        source: A Vicuna's hub id or folder (a relative path is one in this repository); `smollm2` for the model that
            `recipes.smollm2` fetches; or `random` for a small random model in the layout in which Vicuna is published.
        layers: L.
        width: d.
        intermediate: Inner width of its MLPs.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        vocabulary: V.
    """

    name: str
    source: str
    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not getattr(self, name).strip():
                raise InputError(f"base.{name} is empty")
        for name in ("layers", "width", "intermediate", "heads", "kv_heads", "vocabulary"):
            at_least(f"base.{name}", getattr(self, name), 1)

    def located(self) -> BaseConfig:
        """Return this base; a source that is a folder becomes an absolute path.

        Jobs run in a copy of this repository, which lacks what .gitignore names.
        """
        if self.source in (RANDOM, SMOLLM2) or not (folder := in_repository(self.source)).is_dir():
            return self
        return replace(self, source=str(folder))

    def sizes(self, itemsize: int = 2) -> BaseSizes:
        """Return its sizes for formulae.

        Args:
            itemsize: Bytes of a number.
        """
        size = self.width // self.heads
        return BaseSizes(
            self.layers,
            self.width,
            self.intermediate,
            self.heads * size,
            self.kv_heads * size,
            self.vocabulary,
            itemsize,
        )


def in_repository(path: str) -> Path:
    """Return a path; a relative one is one in this repository, wherever a command is called."""
    return HERE.parents[1] / Path(path).expanduser()


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts.

    Args:
        path: JSON lines. A relative path is one in this repository.
        column: Which value of a line is the prompt.
        rows: At most this many, from the beginning; null takes all.
    """

    path: str
    column: str
    rows: int | None = None

    def __post_init__(self) -> None:
        at_least("prompts.files.rows", self.rows, 1)


@dataclass(frozen=True)
class PromptsConfig:
    """What the base answers, for heads to learn from.

    Args:
        written: How many questions the base itself is let write. Those that are of use become prompts.
        files: Files of other prompts.
    """

    written: int = 0
    files: list[PromptFile] = field(default_factory=list)

    def __post_init__(self) -> None:
        at_least("prompts.written", self.written, 0)
        if not self.written and not self.files:
            raise InputError("there are no prompts: set prompts.written, or name prompts.files")


@dataclass(frozen=True)
class HardwareConfig:
    """What GPU hours are estimated for. The sizes of texts are means.

    Args:
        gpu: Its name.
        teraflops: Its dense bf16 arithmetic, in 1e12 operations a second, as its maker states it.
        gigabytes_per_second: Bandwidth of its memory, in 1e9 bytes a second, as its maker states it.
        arithmetic_share: Part of that arithmetic that large matrix products reach.
        bandwidth_share: Part of that bandwidth that a decoding step reaches.
        prompt_tokens: Tokens of a prompt, template included.
        question_tokens: Tokens of a question that the base writes.
        answer_tokens: Tokens of an answer.
        measured_prompts: Prompts that are measured on, all turns of all sets together.
        useful_share: Part of the written questions that become prompts.
    """

    gpu: str
    teraflops: float
    gigabytes_per_second: float
    measured_prompts: int
    arithmetic_share: float = 0.4
    bandwidth_share: float = 0.6
    prompt_tokens: int = 100
    question_tokens: int = 60
    answer_tokens: int = 250
    useful_share: float = 0.6

    def __post_init__(self) -> None:
        for name in ("teraflops", "gigabytes_per_second", "arithmetic_share", "bandwidth_share", "useful_share"):
            at_least(f"hardware.{name}", getattr(self, name), 0, above=True)
        for name in ("measured_prompts", "prompt_tokens", "question_tokens", "answer_tokens"):
            at_least(f"hardware.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class PaperConfig:
    """A run of the recipe.

    Args:
        output: Folder for everything that is made. All machines of the cluster see it under this path.
        base: The base.
        prompts: What it answers.
        questions: Settings of `drafter generate`, with which the base writes questions.
        answers: Settings of `drafter distill`, with which it answers. Every third answer is sampled, others are greedy.
        heads: The heads, by their names in `heads.yaml`, each with fields of its configuration beside those there.
        depth: Draft tokens of a path, the same for every head.
        training: Settings of `drafter train`, the same for every head.
        evaluation: Settings of `drafter evaluate`.
        hardware: What GPU hours are estimated for.
        submissions: How often each job is submitted at most.
        address: Address of the cluster's dashboard; by default RAY_API_SERVER_ADDRESS. Where neither is set, a cluster
            is started on this machine.
        gpus: GPUs of a cluster that is started on this machine; by default those that there are.
    """

    output: str
    base: BaseConfig
    prompts: PromptsConfig
    questions: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    depth: int = 6
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    hardware: HardwareConfig | None = None
    submissions: int = 5
    address: str | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise InputError("output is empty")
        if "://" in self.output:
            raise InputError(f"output {self.output} is a URI: give a folder that all machines of the cluster see")
        if not self.heads:
            raise InputError("heads names no head: take some of recipes/paper/heads.yaml")
        at_least("depth", self.depth, 1)
        at_least("submissions", self.submissions, 1)
        at_least("gpus", self.gpus, 0)

    @property
    def folder(self) -> Path:
        """`output` as an absolute path: the jobs run in another folder than this command."""
        return Path(self.output).expanduser().absolute()


def parse_config(arguments: Sequence[str], command: str, description: str) -> PaperConfig:
    """Read the configuration from a command line; see `command_line.parse`.

    Args:
        arguments: The command line behind the command.
        command: `recipes.paper` and what it is asked to do, for the usage.
        description: For the help.
    """
    parser = make_parser(PaperConfig, command, "--output DIR", description)
    return parse(PaperConfig, parser, arguments)
