"""Configuration, command line and output folder of the job that trains a classifier for `pad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drafter.engine.config import EngineSettings
from drafter.requests import SamplingParams
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig, LoadingConfig
from pipeline.io.files import locate
from pipeline.output.folder import RUN_FILE, read_run
from pipeline.settings import ReadingConfig, ResourcesConfig, WritingConfig


@dataclass(frozen=True)
class PivotsConfig:
    """The labelling of rejected draft tokens.

    Args:
        input: Prompts, as `drafter generate` takes them.
        output: Folder for the results: a new or empty one, or that of an earlier submission of the same job.
        scorer: What an answer is worth: `number`, `string`, `json`, or `FILE.py:function`; see `drafter compare`. None
            is worth less than 0.
        target: Column with the right answer, for a built-in scorer.
        model: Target model: hub id or folder; by default the embedded demonstration model.
        drafter: Drafter whose rejected tokens are labelled; as `drafter generate` takes it.
        tokens_per_prompt: Rejected tokens of each prompt that are labelled, drawn by their positions.
        rollouts: Answers that are generated with a rejected token, and as many without.
        temperature: Their temperature.
        held_out: Share of the prompts that the classifier does not learn from; it is measured on them.
        rounds: How often the decoding of the held-out prompts is timed.
        reading: How rows become prompts.
        loading: How the models are loaded.
        sampling: How the target model answers, and where its answers end. Rows may have only a temperature, a seed and
            a number of tokens of their own.
        engine: How much an engine does at once.
        resources: The job's share of the cluster.
        writing: How rows are written.
    """

    input: str
    output: str
    scorer: str
    target: str | None = None
    model: str | None = None
    drafter: str = "auto"
    tokens_per_prompt: int = 8
    rollouts: int = 20
    temperature: float = 0.7
    held_out: float = 0.25
    rounds: int = 1
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineSettings = field(default_factory=EngineSettings)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    writing: WritingConfig = field(default_factory=WritingConfig)

    def __post_init__(self) -> None:
        for name in ("input", "output", "scorer", "drafter"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        if self.drafter == "none":
            raise InputError("drafter none drafts nothing that could be rejected: name another")
        if "://" in self.output:
            raise InputError(f"output {self.output} must be a folder of this machine or of a disk that all share")
        for name in ("tokens_per_prompt", "rollouts", "rounds"):
            at_least(name, getattr(self, name), 1)
        if self.rollouts > 128:
            raise InputError(f"rollouts must be at most 128, not {self.rollouts}")
        at_least("temperature", self.temperature, 0, above=True)
        if self.temperature > 2:
            raise InputError(f"temperature must be at most 2, not {self.temperature:g}")
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must be between 0 and 1, not {self.held_out:g}")

    def answers(self, output: str) -> GenerateConfig:
        """Return the generation job that answers the prompts exactly."""
        shared = ("input", "model", "drafter", "reading", "loading", "sampling", "engine", "resources", "writing")
        return GenerateConfig(output=output, **{name: getattr(self, name) for name in shared})

    def continuations(self, lines: str, output: str) -> GenerateConfig:
        """Return the generation job that continues texts: the requests of an OpenAI batch, which bring temperatures."""
        reading = ReadingConfig(format="openai")
        sampling = replace(self.sampling, temperature=None, logprobs=None)
        return replace(self.answers(output), input=lines, reading=reading, sampling=sampling)


class PivotsFolder:
    """A job's files under `path`, which is on a local disk or one that all machines share."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, locate(str(path))
        self.run_file = self.root / RUN_FILE
        self.answers = path / "answers"  # output of the generation job that answers the prompts exactly
        self.tokens = path / "rejected.parquet"  # rejected tokens of the answers: rows of `REJECTION_TYPE`
        self.requests = path / "continuations.jsonl"  # OpenAI batch of the texts to continue
        self.continuations = path / "continuations"  # output of the generation job that continues them
        self.labels = path / "labels.parquet"  # rejected tokens with their effect on answers
        self.verifier = path / "verifier"
        self.results = path / "pivots.json"

    def has_results(self) -> bool:
        """Return whether rejected tokens have been found; all later results derive from them."""
        return self.tokens.is_file()

    def forget_job(self) -> None:
        """Delete nothing: there may only be the answers' job, which checks its owner itself."""

    @property
    def is_finished(self) -> bool:
        """True if an earlier submission finished and all its files are there."""
        if not self.run_file.exists:
            return False
        made = (self.labels, self.results, self.verifier / "config.json")
        return bool(read_run(self.run_file)["state"] == "finished") and all(file.is_file() for file in made)


_COMMON = (
    "input",
    "output",
    "scorer",
    "target",
    "model",
    "drafter",
    "tokens_per_prompt",
    "rollouts",
    "temperature",
    "held_out",
    "rounds",
    "sampling.max_new_tokens",
    "reading.prompt_column",
    "reading.messages_column",
    "reading.id_column",
    "reading.limit",
    "engine.max_num_seqs",
    "engine.max_model_len",
    "engine.num_draft_tokens",
    "loading.dtype",
    "loading.device",
    "resources.max_actors",
    "resources.gpus_per_actor",
)
"""Settings that `--help` shows."""
_DESCRIPTION = """\
Make a classifier for the verifier pad: which draft tokens may pass though the target model would not choose them.

The target model answers the prompts. Each rejected draft token is a question: texts are continued with it and
without it, and scored. A token that makes answers worse is a pivot. A classifier learns to tell pivots
from the base's hidden state.

The job writes to --output: labels.parquet, verifier/ (for --verifier pad --verifier.classifier), pivots.json,
and plots: ROC, and utility against speed. Submitting the same command again goes on where the job stopped.

  drafter pivots --input gsm8k.jsonl --reading.prompt_column question --scorer number --target answer \\
      --output pivots
  drafter pivots --input prompts.jsonl --scorer score.py:is_right --model MODEL --drafter HEAD --output pivots"""


def parse_config(arguments: Sequence[str] | None = None) -> PivotsConfig:
    """Parse the job's command line; see `command_line.parse`."""
    parser = make_parser(PivotsConfig, "pivots", "--input PATH --scorer NAME --output DIR", _DESCRIPTION, _COMMON)
    return parse(PivotsConfig, parser, arguments)
