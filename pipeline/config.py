"""The configuration of a generation job: typed, from YAML and the command line, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, Namespace

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from pipeline.errors import InputError, one_line

Format = Literal["jsonl", "parquet", "csv", "text"]


def _at_least(name: str, value: float | None, low: float, *, above: bool = False) -> None:
    if value is not None and (not math.isfinite(value) or value < low or (above and value == low)):
        raise InputError(f"{name} must be {'more than' if above else 'at least'} {low:g}, not {value:g}")


@dataclass(frozen=True)
class ReadingConfig:
    """How rows become prompts.

    Args:
        format: Of the input files; `auto` goes by their names (.jsonl, .parquet, .csv, .txt; .gz and the like too).
        prompt_column: Column of text prompts; by default `prompt`, if `messages_column` is not set either.
        messages_column: Column of chat messages: a list of {role, content}, or that as JSON text.
        id_column: Column whose value names a row, each once; by default a row is named by its file and place.
        sampling_column: Column with a row's own sampling settings: an object, or that as JSON text.
        chat: Put a text prompt as a user's message through the chat template; by default wherever there is a template.
        limit: Take only the first rows.
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text"] = "auto"
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    sampling_column: str = "sampling"
    chat: bool | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_column is not None and self.messages_column is not None:
            raise InputError("reading.prompt_column and reading.messages_column are both set: a row has one prompt")
        _at_least("reading.limit", self.limit, 1)


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
class EngineSettings:
    """How much an engine does at once.

    Args:
        slots: Requests decoded together.
        max_length: Prompt and output tokens a request may have; by default the base's own limit, at most 2,048.
        nodes: Draft tokens verified a step; `auto` adapts to what pays on the machine.
    """

    slots: int = 16
    max_length: int | None = None
    nodes: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _at_least("engine.slots", self.slots, 1)
        _at_least("engine.max_length", self.max_length, 2)
        if self.nodes != "auto":
            _at_least("engine.nodes", self.nodes, 0)


@dataclass(frozen=True)
class ResourcesConfig:
    """What of the cluster the job takes.

    Args:
        min_actors: Engines to start with.
        max_actors: Most engines; by default one for each GPU (or share of one), or `min_actors` where there is none.
        gpus_per_actor: GPUs of an engine, a fraction allowed; by default 1 where there are GPUs, otherwise 0.
        cpus_per_actor: CPU cores of an engine, and so its threads; by default 1 beside a GPU, otherwise all but half
            a core, shared by `max_actors`.
        max_task_retries: How often a file's rows are tried again after their engine's process died.
    """

    min_actors: int = 1
    max_actors: int | None = None
    gpus_per_actor: float | None = None
    cpus_per_actor: float | None = None
    max_task_retries: int = 3

    def __post_init__(self) -> None:
        _at_least("resources.min_actors", self.min_actors, 1)
        if self.max_actors is not None:
            _at_least("resources.max_actors", self.max_actors, self.min_actors)
        _at_least("resources.gpus_per_actor", self.gpus_per_actor, 0)
        _at_least("resources.cpus_per_actor", self.cpus_per_actor, 0, above=True)
        _at_least("resources.max_task_retries", self.max_task_retries, 0)


@dataclass(frozen=True)
class WritingConfig:
    """How results are written.

    Args:
        rows_per_file: Rows of an output file, which is also what is committed at once and redone after a failure.
    """

    rows_per_file: int = 128

    def __post_init__(self) -> None:
        _at_least("writing.rows_per_file", self.rows_per_file, 1)


@dataclass(frozen=True)
class GenerateConfig:
    """A generation job.

    Args:
        input: A file, a folder, a pattern (`data/**/*.jsonl`), or a URI such as `s3://bucket/folder`.
        output: Folder or URI for the results; new, empty, or of an earlier submission of the same job.
        model: Base model: hub id or folder; by default the embedded demonstration model.
        drafter: What proposes tokens: `none`, `ngram`, a draft head's folder or hub id, `ctc` (the embedded head), two
            joined by `+`, or `auto`.
        reading: How rows become prompts.
        loading: How the models are loaded.
        sampling: How tokens are chosen.
        engine: How much an engine does at once.
        resources: What of the cluster the job takes.
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
    writing: WritingConfig = field(default_factory=WritingConfig)

    def __post_init__(self) -> None:
        for name in ("input", "output", "drafter"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        values = dataclasses.asdict(self)
        values["sampling"]["stop"] = list(self.sampling.stop)
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
  python -m jobs.generate --config examples/demo.yaml --output elsewhere

Settings come from --config (YAML), then from the command line, which wins. --print_config shows them."""


def make_parser() -> ArgumentParser:
    """The command line of the job."""
    parser = ArgumentParser(
        prog="python -m jobs.generate",
        usage="python -m jobs.generate --input PATH --output DIR [--config FILE] [settings]",
        description=_DESCRIPTION,
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    parser.add_class_arguments(GenerateConfig)
    return parser


def parse_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """The configuration that a command line asks for (`sys.argv` by default).

    Raises:
        InputError: An unknown setting, a value of the wrong type or out of range, or a file that cannot be read.
        SystemExit: `--help` or `--print_config` was asked for, and is done.
    """
    parser = make_parser()
    try:
        parsed = parser.parse_args(arguments)
        for group in dataclasses.fields(GenerateConfig):
            if group.default_factory is not dataclasses.MISSING and not isinstance(parsed[group.name], Namespace):
                raise InputError(f"{group.name} must be a group of settings, not {parsed[group.name]!r}")
        values = dict(parser.instantiate(parsed))
        values.pop("config")
        return GenerateConfig(**values)
    except RequestError as error:
        raise InputError(f"sampling.{error}") from error
    except InputError:
        raise
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise InputError(_readable(str(error))) from error


def _readable(message: str) -> str:
    """jsonargparse's messages on one line, without Python's words for types."""
    message = one_line(message)
    key = re.search(r'Parser key "([^"]+)":', message)
    given = re.search(r"(?:Given value|Got value): (.*)$", message)
    expected = re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal(\[[^\]]*\]))", message)
    if key and given and expected:
        names = {
            "NoneType": "null",
            "str": "text",
            "int": "an integer",
            "float": "a finite number",
            "bool": "true or false",
            "tuple": "a list",
        }
        kinds = [names.get(kind, kind) or "one of " + choices[1:-1].replace("'", "") for kind, choices in expected]
        return f"{key[1]} must be {' or '.join(kinds)}, not {given[1]}"
    return message.replace("Problems parsing config: ", "the configuration is not YAML: ")
