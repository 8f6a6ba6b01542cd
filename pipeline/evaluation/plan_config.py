"""The configuration of a planning job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError
from pipeline.generate.generate_config import LoadingConfig


@dataclass(frozen=True)
class PlanConfig:
    """A plan of the best stack of drafters.

    Args:
        output: Folder for the results; what an earlier plan has written there is replaced.
        drafters: A list of drafters that may be levels of a stack: `model:` and a model's folder or hub id; or, as the
            lowest level alone, `cacheback`, `ngram`, `memory`, or several of these joined by `+`.
        model: Base model, as a hub id or folder; by default the embedded demonstration model.
        questions: A sample of the job's prompts: JSON lines, as `jobs.evaluate` takes them.
        questions_per_file: Number of questions to take, spread evenly over the file; null takes all. The plan rests on
            every other one; what it expects is compared with what the others take.
        nodes: Draft tokens that the base verifies in a step; by default as many as can pay on the device.
        batch: Number of requests decoded together.
        temperature: Sampling temperature.
        max_new_tokens: Longest answer.
        loading: How the base is loaded.
        gpus: Number of GPUs to use; by default 1 where there are any.
    """

    output: str
    drafters: list[str]
    model: str | None = None
    questions: str = "data/gsm8k/test.jsonl"
    questions_per_file: int | None = 16
    nodes: int | None = None
    batch: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 64
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    gpus: float | None = None

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise InputError("output is empty")
        if not self.drafters or len(set(self.drafters)) < len(self.drafters):
            raise InputError(f"drafters must be at least one name, none of them twice, not {self.drafters}")
        at_least("questions_per_file", self.questions_per_file, 2)
        for name in ("nodes", "batch", "max_new_tokens"):
            at_least(name, getattr(self, name), 1)
        at_least("gpus", self.gpus, 0)
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be finite and at least 0, not {self.temperature}")


_DESCRIPTION = """\
Find the stack of drafters with the lowest expected time a token, from how much of each other's drafts the models accept
and what their forwards cost, measured on a sample of prompts. What the best stack takes is measured on others.

The job prints what it compared, and writes it to --output: stacks.json and stacks.md. The best stack's name goes to
--drafter of jobs.generate and jobs.serve.

  python -m jobs.plan --model MODEL --drafters '[cacheback, "model:SMALL", "model:SMALLER"]' --questions sample.jsonl \\
      --output plan"""


def parse_plan(arguments: Sequence[str] | None = None) -> PlanConfig:
    """Return the plan that a command line asks for; see `command_line.parse`."""
    return parse(PlanConfig, make_parser(PlanConfig, "jobs.plan", "--output DIR", _DESCRIPTION), arguments)
