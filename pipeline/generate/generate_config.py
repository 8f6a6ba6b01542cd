"""The configuration of a generation job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser

from drafter.engine.engine_config import EngineSettings
from drafter.requests import SamplingParams
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError

Format = Literal["jsonl", "parquet", "csv", "text", "arrow"]


@dataclass(frozen=True)
class ReadingConfig:
    """How rows become prompts.

    Args:
        format: Of the input files; `auto` goes by their names (.jsonl, .parquet, .csv, .txt; .gz and the like too) and
            sees whether JSON lines are an OpenAI batch; `openai` says that they are.
        split: Which split of a Hugging Face dataset, such as `train`; by default the only one.
        subset: Which subset of a Hugging Face dataset; by default the only one, or `default`.
        prompt_column: Column of text prompts; by default `prompt`, if `messages_column` is not set either.
        messages_column: Column of chat messages: a list of {role, content}, or that as JSON text.
        id_column: Column whose value names a row, each once; by default a row is named by its file and place.
        sampling_column: Column with a row's own sampling settings: an object, or that as JSON text.
        chat: Put a text prompt as a user's message through the chat template; by default wherever there is a template.
        skip: Leave out so many rows at the beginning.
        limit: Take only so many rows.
        samples: Texts to generate for each row, each with a seed of its own and a row named `ID#0`, `ID#1`, ….
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text", "arrow", "openai"] = "auto"
    split: str | None = None
    subset: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    sampling_column: str = "sampling"
    chat: bool | None = None
    skip: int = 0
    limit: int | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        if self.prompt_column is not None and self.messages_column is not None:
            raise InputError("reading.prompt_column and reading.messages_column are both set: a row has one prompt")
        at_least("reading.skip", self.skip, 0)
        at_least("reading.limit", self.limit, 1)
        at_least("reading.samples", self.samples, 1)


@dataclass(frozen=True)
class LoadingConfig:
    """How the models are loaded.

    Args:
        dtype: Of the weights; `auto` is bf16 on a GPU and fp32 on a CPU.
        device: `auto` is the GPU where there is one, otherwise the CPU.
        device_map: As in transformers, for a base larger than one GPU.
        trust_remote_code: Run modeling code that comes with the weights.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ResourcesConfig:
    """What of the cluster the job takes.

    Args:
        min_actors: Engines to start with.
        max_actors: Most engines; by default, on a cluster, as many as there is work and room for; on one machine, one
            for each GPU (or share of one), or `min_actors` where there is none.
        gpus_per_actor: GPUs of an engine, a fraction allowed; by default 1 where there are GPUs, or nothing can run
            yet; otherwise 0. Say it for a cluster that has only CPUs now and is to get GPUs.
        cpus_per_actor: CPU cores of an engine, and so its threads; by default at most 1 beside a GPU, otherwise all of
            a node but half a core, shared by the node's engines. Lowered a little where it would fill a node.
    """

    min_actors: int = 1
    max_actors: int | None = None
    gpus_per_actor: float | None = None
    cpus_per_actor: float | None = None

    def __post_init__(self) -> None:
        at_least("resources.min_actors", self.min_actors, 1)
        if self.max_actors is not None:
            at_least("resources.max_actors", self.max_actors, self.min_actors)
        at_least("resources.gpus_per_actor", self.gpus_per_actor, 0)
        if self.gpus_per_actor is not None and self.gpus_per_actor > 1 and self.gpus_per_actor % 1:
            raise InputError(f"resources.gpus_per_actor must be whole above 1, not {self.gpus_per_actor:g}")
        at_least("resources.cpus_per_actor", self.cpus_per_actor, 0, above=True)


@dataclass(frozen=True)
class LimitsConfig:
    """What is given up, and when.

    Args:
        row_attempts: A row that was in an engine whose process ended, so often, is set aside with an error; it had the
            engine to itself the last times.
        row_seconds: A row that an engine has had for so long gets an error; by default there is no limit.
        step_seconds: A step of an engine that takes longer hangs: the engine's process is ended.
        drain_seconds: After SIGTERM, how long rows may go on that have begun.
    """

    row_attempts: int = 4
    row_seconds: float | None = None
    step_seconds: float = 600.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        at_least("limits.row_attempts", self.row_attempts, 2)
        at_least("limits.row_seconds", self.row_seconds, 0, above=True)
        at_least("limits.step_seconds", self.step_seconds, 0, above=True)
        at_least("limits.drain_seconds", self.drain_seconds, 0)


@dataclass(frozen=True)
class WritingConfig:
    """How results are written.

    Args:
        rows_per_file: Rows of an output file, which is also what is committed at once and redone after a failure.
        per_step_accepted: Write how many draft tokens each step of a row accepted.
        compact_mb: At the end, merge files of results until each has so many megabytes; by default they stay as they
            are.
    """

    rows_per_file: int = 128
    per_step_accepted: bool = True
    compact_mb: float | None = None

    def __post_init__(self) -> None:
        at_least("writing.rows_per_file", self.rows_per_file, 1)
        at_least("writing.compact_mb", self.compact_mb, 0, above=True)


@dataclass(frozen=True)
class GenerateConfig:
    """A generation job.

    Args:
        input: A file, a folder, a pattern (`data/**/*.jsonl`), or a URI such as `s3://bucket/folder` or
            `hf://datasets/owner/name`.
        output: Folder or URI for the results; new, empty, or of an earlier submission of the same job.
        model: Base model: hub id or folder; by default the embedded demonstration model.
        drafter: What proposes tokens: `none`, `ngram`, a draft head's folder or hub id, `ctc` (the embedded head), two
            joined by `+`, or `auto`.
        reading: How rows become prompts.
        loading: How the models are loaded.
        sampling: How tokens are chosen.
        engine: How much an engine does at once.
        resources: What of the cluster the job takes.
        limits: What is given up, and when.
        writing: How results are written.
    """

    input: str
    output: str
    model: str | None = None
    drafter: str = "auto"
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineSettings = field(default_factory=EngineSettings)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    writing: WritingConfig = field(default_factory=WritingConfig)

    def __post_init__(self) -> None:
        for name in ("input", "output", "drafter"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        if (self.resources.gpus_per_actor or 0) > 1 and self.loading.device_map is None:
            raise InputError(
                f"an engine would use one of resources.gpus_per_actor = {self.resources.gpus_per_actor:g} GPUs: "
                "set loading.device_map to auto, or take 1"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        values = dataclasses.asdict(self)
        values["sampling"]["stop"] = list(self.sampling.stop)
        values["sampling"]["logit_bias"] = [list(pair) for pair in values["sampling"]["logit_bias"]]
        return values

    def as_yaml(self) -> str:
        """The configuration as a file that `--config` takes."""
        return str(yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True))


_DESCRIPTION = """\
Generate a text for every row of a dataset, by speculative decoding that never changes the tokens.

Rows are read from --input, results written to --output: data/ (one row a prompt, with acceptance
statistics), errors/ (rows that could not be generated, and why) and run.json (what was run).
Submitting the same command again goes on where the job stopped.

  python -m jobs.generate --input prompts.jsonl --output out
  python -m jobs.generate --input 'data/*.parquet' --reading.prompt_column question --output out \\
      --model meta-llama/Llama-3.2-1B-Instruct --sampling.temperature 0.7
  python -m jobs.generate --config examples/demo.yaml --output elsewhere"""


def generate_parser(job: str = "jobs.generate", description: str = _DESCRIPTION) -> ArgumentParser:
    """The command line of the generation job, or of one that is the same with another name."""
    return make_parser(GenerateConfig, job, "--input PATH --output DIR", description)


def parse_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """The generation job that a command line asks for; see `command_line.parse`."""
    return parse(GenerateConfig, generate_parser(), arguments)
