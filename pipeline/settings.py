"""Settings shared by jobs: `loading.*`, `resources.*`, `limits.*`, `writing.*` and `reading.*`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from drafter.images.opening import ImageLimits
from drafter.requests import GenerationRule
from pipeline.command_line import at_least
from pipeline.errors import InputError


@dataclass(frozen=True)
class ResourcesConfig:
    """Cluster resources of the job.

    Args:
        min_actors: Engines to start with.
        max_actors: Most engines. By default as many as a cluster has work and room for; on one machine, one for each
            GPU (or share of one), or `min_actors` where there is no GPU.
        gpus_per_actor: GPUs of an engine, a fraction allowed. By default `engine.tensor_parallel_size` where there are
            GPUs, or where nothing can run yet; otherwise 0. Set it for a cluster that has only CPUs now and is to get
            GPUs.
        cpus_per_actor: CPU cores of an engine, and so its threads. By default at most 1 beside a GPU; otherwise all
            cores of a node but half a core, divided among its engines. Lowered where a node would have none left.
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
class LoadingConfig:
    """Loading of the models.

    Args:
        dtype: Type of the weights; `auto` is bf16 on a GPU and fp32 on a CPU.
        device: Device of the models; `auto` is the GPU where there is one, otherwise the CPU.
        device_map: As in transformers, for a target model that is larger than one GPU.
        trust_remote_code: Run the modeling code that comes with the weights.
        generation_config: `ignore` leaves out sampling settings that come with the model, in its
            `generation_config.json`; by default they count where the job's own say nothing.
        adapter: A LoRA adapter that is merged into the model's weights: folder or hub id.
        dequantize: Load quantised weights as floating-point numbers. Needed where activations are quantised, too.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    generation_config: GenerationRule = "auto"
    adapter: str | None = None
    dequantize: bool = False


@dataclass(frozen=True)
class LimitsConfig:
    """Limits on rows, steps and draining.

    Args:
        row_seconds: A row that an engine has had for this long gets an error; by default there is no limit, but for a
            program (`rollout`), which has an hour.
        step_seconds: An engine whose step takes longer than this hangs, and its process is ended.
        drain_seconds: After SIGTERM, rows that have begun may go on for this long.
    """

    row_seconds: float | None = None
    step_seconds: float = 600.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        at_least("limits.row_seconds", self.row_seconds, 0, above=True)
        at_least("limits.step_seconds", self.step_seconds, 0, above=True)
        at_least("limits.drain_seconds", self.drain_seconds, 0)


@dataclass(frozen=True)
class WritingConfig:
    """Format of the results.

    Args:
        rows_per_file: Rows of an output file; also the unit of commits and retries. By default 128, and up to 1,024 for
            an input of gigabytes.
    """

    rows_per_file: int | None = None

    def __post_init__(self) -> None:
        at_least("writing.rows_per_file", self.rows_per_file, 1)


@dataclass(frozen=True)
class CostConfig:
    """What the machines cost.

    Args:
        per_gpu_hour: Price of a GPU for an hour, in any currency; with it `run.json` has the cost of the output.
    """

    per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        at_least("cost.per_gpu_hour", self.per_gpu_hour, 0)


_HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


@dataclass(frozen=True)
class ImagesConfig:
    """Images of prompts, for target models that see.

    Args:
        hosts: Hosts from which images at addresses of http and https are fetched, as HOST or HOST:PORT; by default
            none. Addresses that are not public are refused in any case, after redirects, too.
        bytes: Most bytes of the files of a prompt's images, all together.
        pixels: Most pixels of a prompt's images, all together. Memory and time for these follow from it.
        most: Most images of a prompt.
    """

    hosts: list[str] = field(default_factory=list)
    bytes: int = ImageLimits.bytes
    pixels: int = ImageLimits.pixels
    most: int = ImageLimits.images

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "most"):
            at_least(f"images.{name}", getattr(self, name), 1)
        for name in ("hosts", "folders"):  # each character of a text would be one: of ./ the whole disk
            if isinstance(given := getattr(self, name, []), str):
                raise InputError(f"images.{name} must be a list, not {given!r}")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise InputError(f"images.hosts must be names such as example.com, in lower case, not {host!r}")

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(self.bytes, self.pixels, self.most)


@dataclass(frozen=True)
class RowImagesConfig(ImagesConfig):
    """Images of rows' prompts, for target models that see.

    Args:
        folders: Folders whose images rows may name beside those of the input's own folder, or bucket: paths, or URIs
            such as s3://bucket/pictures.
    """

    folders: list[str] = field(default_factory=list)


TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs")
"""Columns beside chat messages that go to the chat template, as in TRL's datasets."""
SAMPLING_COLUMN = "sampling"
"""Column of a row's own sampling settings: an object, or that object as JSON text."""
Format = Literal["jsonl", "parquet", "csv", "text", "arrow"]


@dataclass(frozen=True)
class ReadingConfig:
    """Conversion of rows to prompts.

    Args:
        format: Format of the input files. `auto` goes by their names (.jsonl, .parquet, .csv, .txt, .arrow; also .gz
            and the like) and recognises JSON lines that are an OpenAI batch; `openai` says that they are one.
        split: Split of a Hugging Face dataset, such as `train`; by default the only one.
        subset: Subset of a Hugging Face dataset; by default the only one, or the one that its README makes the default.
        prompt_column: Column of text prompts; by default `prompt`, if `messages_column` is not set either.
        messages_column: Column of chat messages: a list of {role, content}, or that list as JSON text.
        images_column: Column of a row's images, one or a list: paths from the file's folder, URIs, `data:` URIs, bytes,
            Hugging Face's {bytes, path}, or pixels. They come before the text, or where messages have a place for them.
        id_column: Column of unique row names, by default `id`. Where there is none, and with an empty text, rows are
            named by file and line.
        chat: Send a text prompt as a user's message through the chat template; by default wherever the model has one.
        date: Date or time for chat templates, as in 2026-03-31 or 2026-03-31T12:00; by default that of the job's start.
        special_tokens: Let the text of a special token in a chat message be that token; by default it is text.
        chat_template_kwargs: Settings that the chat template reads, such as {"enable_thinking": false}, for all rows;
            those of a column of that name come first.
        skip: Leave out this many rows at the beginning.
        limit: Take at most this many rows.
        samples: Texts to generate for each row, each with its own seed, in rows named `ID#0`, `ID#1`, ….
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text", "arrow", "openai"] = "auto"
    split: str | None = None
    subset: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    images_column: str | None = None
    id_column: str | None = None
    chat: bool | None = None
    date: str | None = None
    special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    skip: int = 0
    limit: int | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        if self.prompt_column is not None and self.messages_column is not None:
            raise InputError("reading.prompt_column and reading.messages_column are both set: a row has one prompt")
        if self.date is not None:
            try:
                datetime.fromisoformat(self.date)
            except ValueError:
                raise InputError(f"reading.date must be as 2026-03-31 or 2026-03-31T12:00, not {self.date!r}") from None
        at_least("reading.skip", self.skip, 0)
        at_least("reading.limit", self.limit, 1)
        at_least("reading.samples", self.samples, 1)
