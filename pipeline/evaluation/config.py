"""Configuration and command line of the evaluation job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter.engine.config import EngineSettings
from drafter.evaluation.results import Nodes, Plan
from drafter.heads.config import Tree
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError
from pipeline.settings import LoadingConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation. Settings that take "one or a list" are measured in all combinations.

    Args:
        input: A file of questions, such as some of your prompts, or files by name, as in `{a: a.jsonl, b: b.jsonl}`:
            JSON lines with `prompt` or `messages`, as `drafter generate` reads them, `turns` (MT-bench's format) or
            `question` (GSM8K's).
        output: Folder for the results. It is new, empty, or the output of an earlier submission of the same job.
        model: Target model, as a hub id, folder or GGUF file; by default the embedded demonstration model.
        drafter: One or a list, as `drafter generate` takes them: draft heads' folders, `ctc`, `ngram`, `ctc+ngram`. By
            default `auto`, as there.
        tree: One or a list. `exact` is the best trie under the drafter's distributions, `chain` its most probable path
            alone, `static` the published fixed tree; drafters that do not have one are left out there.
        num_draft_tokens: One or a list: draft tokens verified in a step. `auto` adapts to what pays on the machine.
        batch: One or a list: number of requests decoded together; by default 1, and 16 or as many as there are.
        temperature: One or a list: sampling temperatures.
        questions_per_file: Number of questions to take, spread evenly over each file; null takes all.
        by_category: Measure each category of a file by itself; `questions_per_file` is then of each category.
        acceptance: `synthetic:2.5` forces 2.5 tokens a step upon the drafters: how fast the system is with a drafter of
            that worth, at the cost of this one. For measuring alone.
        samples: Answers to each question, each with a seed of its own, above temperature 0.
        rounds: How often everything is timed.
        max_new_tokens: Longest answer.
        compile: Compile the target model's forward, as `engine.compile` of `drafter generate` does.
        loading: How the models are loaded.
        gpus: Number of GPUs to use; by default 1 where there are any.
    """

    input: dict[str, str] | str
    output: str
    model: str | None = None
    drafter: list[str] | str = "auto"
    tree: list[Tree] | Tree = "exact"
    num_draft_tokens: list[Nodes] | Nodes = "auto"
    batch: list[int] | int | None = None
    temperature: list[float] | float = 0.0
    questions_per_file: int | None = 16
    by_category: bool = False
    acceptance: str | None = None
    samples: int = Plan.samples
    rounds: int = Plan.rounds
    max_new_tokens: int = 128
    compile: bool = Plan.compile
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    gpus: float | None = None

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise InputError("output is empty")
        if not self.files or not all(file.strip() for file in self.files.values()):
            raise InputError("input must name at least one file")
        at_least("questions_per_file", self.questions_per_file, 1)
        at_least("gpus", self.gpus, 0)
        try:
            self.plan()
        except ValueError as error:  # which has the plan's names, in the plural
            raise InputError(re.sub("^(drafter|tree|batch|temperature)e?s", r"\1", str(error))) from error

    @property
    def files(self) -> dict[str, str]:
        """Files of questions by name: without its suffix, one alone is its own."""
        return {Path(self.input).stem or self.input: self.input} if isinstance(self.input, str) else self.input

    def plan(self, questions: int = EngineSettings.max_num_seqs) -> Plan:
        """Return the plan of drafters, for files of at least so many questions, or raise `ValueError`."""
        usual = sorted({1, min(questions, EngineSettings.max_num_seqs)})
        shared = ("samples", "rounds", "max_new_tokens", "compile")
        return Plan(
            _each(self.drafter),
            _each(self.tree),
            _each(self.num_draft_tokens),
            _each(usual if self.batch is None else self.batch),
            _each(self.temperature),
            **{name: getattr(self, name) for name in shared},
            acceptance=self._forced(),
        )

    def _forced(self) -> float | None:
        if self.acceptance is None:
            return None
        if (found := re.fullmatch(r"synthetic:(\d+(\.\d+)?)", self.acceptance)) is None:
            raise InputError(f"acceptance must be null, or tokens a step as synthetic:2.5, not {self.acceptance!r}")
        return float(found[1])


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


_DESCRIPTION = """\
Measure what drafters gain on your prompts, side by side with plain decoding in one run: tokens a step (β), how many
times as fast it is (γ), time by stage.

The job writes to --output: results.json (raw counts and seconds) and table.md. Submit the same command
again to resume the job where it stopped.

  drafter evaluate --model MODEL --input prompts.jsonl --output gain
  drafter evaluate --model MODEL --drafter trained/head --input prompts.jsonl --output gain
  drafter evaluate --model MODEL --drafter '[HEAD, ngram]' --num_draft_tokens '[16, auto]' \\
      --batch '[1, 4, 16]' --input '{mt-bench: question.jsonl}' --questions_per_file null --output out"""


def parse_config(arguments: Sequence[str] | None = None) -> EvaluateConfig:
    parser = make_parser(EvaluateConfig, "evaluate", "--input FILE --output DIR", _DESCRIPTION)
    return parse(EvaluateConfig, parser, arguments)
