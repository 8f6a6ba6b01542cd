"""The configuration of a generation job, and its command lines."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonargparse import Namespace

from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineSettings
from drafter.errors import one_line
from drafter.requests import SamplingParams
from pipeline.command_line import JobParser, at_least, make_parser, parse
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.learning.config import LearningConfig
from pipeline.settings import (
    CostConfig,
    LimitsConfig,
    LoadingConfig,
    ReadingConfig,
    ResourcesConfig,
    RowImagesConfig,
    WritingConfig,
)


@dataclass(frozen=True)
class GenerateConfig:
    """A generation job.

    Args:
        input: A file, a folder, a pattern (`data/**/*.jsonl`), or a URI such as `s3://bucket/folder` or
            `hf://datasets/owner/name`.
        output: Folder or URI for the results: a new or empty one, or that of an earlier submission of the same job.
        model: Target model: hub id, folder, URI of one, or GGUF file; by default the embedded demonstration model.
        drafter: Drafter: `none`, `ngram`, `memory`, `cacheback`, `cacheback:` and a table of a corpus, `forced`,
            `exit:N`, a draft head's folder or hub id, `ctc` (the embedded head), `model:` and a draft model's, several
            of these joined by `+`, `long:N:DRAFTER`, `stack:LOWER>model:A`, or `auto`.
        verifier: Verifier of draft tokens; by default the output is that of plain decoding.
        learning: A draft head that learns from the rows while the job runs.
        reading: Conversion of rows to prompts.
        images: Images of prompts.
        loading: Loading of the models.
        sampling: Sampling of tokens.
        engine: Sizes of an engine.
        resources: Cluster resources of the job.
        limits: Limits on rows, steps and draining.
        writing: Format of the results.
        rollout: `module:function` of yours, `async def f(row, generate)`, that runs for each row: it asks the engine
            by `await generate(messages)` as often as it likes, and returns the row's columns.
        stop_after_valid: End the job when so many rows are valid; others are not in the output.
        on_part: `module:function` of yours that is called with the path of each file of finished rows.
        cost: What the machines cost.
        dry_run: Print how many rows of an earlier submission are kept, how many are new, and which cannot be generated;
            do no more.
    """

    input: str
    output: str
    model: str | None = None
    drafter: str = "auto"
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    learning: LearningConfig = field(default_factory=LearningConfig)
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    images: RowImagesConfig = field(default_factory=RowImagesConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineSettings = field(default_factory=EngineSettings)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    writing: WritingConfig = field(default_factory=WritingConfig)
    rollout: str | None = None
    stop_after_valid: int | None = None
    on_part: str | None = None
    cost: CostConfig = field(default_factory=CostConfig)
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("input", "output", "drafter"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        one = self.loading.device_map is None and self.engine.tensor_parallel_size == 1
        if one and (self.resources.gpus_per_actor or 0) > 1:
            raise InputError(
                f"an engine would use one of resources.gpus_per_actor = {self.resources.gpus_per_actor:g} GPUs: "
                "set engine.tensor_parallel_size, or loading.device_map to auto, or take 1"
            )
        at_least("stop_after_valid", self.stop_after_valid, 1)
        self.learning.check_beside(self.drafter, self.verifier, self.engine)

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # with lists for tuples
        return values


COMMON = (
    "input",
    "output",
    "model",
    "drafter",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.seed",
    "sampling.stop",
    "sampling.structured_outputs",
    "sampling.logprobs",
    "reading.prompt_column",
    "reading.messages_column",
    "reading.id_column",
    "reading.format",
    "reading.split",
    "reading.limit",
    "reading.samples",
    "reading.chat",
    "engine.max_num_seqs",
    "engine.max_model_len",
    "engine.num_draft_tokens",
    "engine.kv_gib",
    "loading.dtype",
    "resources.max_actors",
    "resources.gpus_per_actor",
    "resources.cpus_per_actor",
    "writing.rows_per_file",
)
"""Settings that `--help` shows for a generation job."""
_GENERATE = """\
Generate a text for every row of a dataset, by speculative decoding that never changes the tokens.

Rows are read from --input, results written to --output: data/ (one row a prompt, with acceptance
statistics), errors/ (rows that could not be generated, and why) and run.json (what was run).
Submitting the same command again goes on where the job stopped.

  drafter generate --input prompts.jsonl --output out
  drafter generate --input 'data/*.parquet' --reading.prompt_column question --output out \\
      --model meta-llama/Llama-3.2-1B-Instruct --sampling.temperature 0.7
  drafter generate --input letters.jsonl --output out --sampling.structured_outputs.json schema.json
  drafter generate --config examples/demo.yaml --output elsewhere"""


_DISTILL = """\
Let the target model answer prompts itself, to get the text that its draft head learns from.

This is drafter generate with longer answers by default: the same input, output and settings, and
submitting the same command again goes on where the job stopped. drafter train takes the output.

  drafter distill --input prompts.jsonl --output distilled
  drafter distill --input prompts.jsonl --output distilled-sampled --sampling.temperature 0.8
  drafter distill --config examples/distill.yaml"""


_STRUCTURED = "sampling.structured_outputs"
_START = re.compile(r"\bstart\b[^\n]*:")
"""Every grammar has a rule of this name."""


def read_files(settings: Namespace) -> None:
    """Put a schema, or a grammar, in the place of the name of its file.

    Raises:
        InputError: There is no such file, or it is not text, or a schema's is not JSON.
    """
    sampling = settings.sampling
    asked = sampling.structured_outputs if isinstance(sampling, Namespace) else None  # that is refused later
    if asked is None:
        return
    if isinstance(asked.json, str) and not asked.json.lstrip().startswith("{") and asked.json not in ("true", "false"):
        asked.json = _file_text("json", asked.json, "a schema")
    if asked.grammar is not None and "\n" not in asked.grammar and not _START.search(asked.grammar):
        asked.grammar = _file_text("grammar", asked.grammar, "a grammar, with a rule start")


def _file_text(setting: str, name: str, wanted: str) -> str:
    try:
        text = locate(name).read_text().removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        why = f"the file {name} cannot be read: {one_line(error)}"
        raise InputError(f"{_STRUCTURED}.{setting} must be {wanted}, or the name of a file with it: {why}") from error
    try:
        if setting == "json":
            json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_STRUCTURED}.{setting}: the file {name} is not JSON: {one_line(error)}") from error
    return text


def generate_parser(job: str = "generate", description: str = _GENERATE) -> JobParser:
    """Make the command line of the generation job, or of the same job by another name."""
    return make_parser(GenerateConfig, job, "--input PATH --output DIR", description, COMMON)


def parse_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """Parse the generation job's command line; see `command_line.parse`."""
    return parse(GenerateConfig, generate_parser(), arguments, read_files)


def parse_distill_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """Parse the command line of the distillation job: the generation job, with longer answers by default.

    It refuses what `drafter train` would refuse after all the work.
    """
    parser = generate_parser("distill", _DISTILL)
    parser.set_defaults({"sampling.max_new_tokens": 1024})
    config = parse(GenerateConfig, parser, arguments, read_files)
    lenient = config.verifier.name if config.verifier.name != "exact" else None
    others = {"verifier": lenient, "rollout": config.rollout, "loading.adapter": config.loading.adapter}
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{name} {value}: drafter train cannot learn from such answers; leave it out")
    return config
