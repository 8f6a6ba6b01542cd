"""Configuration and command line of the job that trains a classifier for `pad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError
from pipeline.settings import ResourcesConfig


@dataclass(frozen=True)
class PivotsConfig:
    """The labelling of rejected draft tokens.

    Args:
        input: Answers: the output of an exact `drafter generate`, whose models and settings the job takes.
        output: Folder for the results; what an earlier submission has written there is replaced.
        scorer: What an answer is worth: `number`, `string`, `json`, or `FILE.py:function`; see `drafter compare`. None
            is worth less than 0.
        target: Column with the right answer, for a built-in scorer.
        drafter: Drafter whose rejected tokens are labelled; by default that of the answers.
        tokens_per_prompt: Rejected tokens of each answer that are labelled, drawn by their positions.
        rollouts: Answers that are generated with a rejected token, and as many without.
        temperature: Their temperature.
        held_out: Share of the prompts that the classifier does not learn from; it is measured on them.
        resources: The job's share of the cluster; by default one engine.
    """

    input: str
    output: str
    scorer: str
    target: str | None = None
    drafter: str | None = None
    tokens_per_prompt: int = 8
    rollouts: int = 20
    temperature: float = 0.7
    held_out: float = 0.25
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def __post_init__(self) -> None:
        for name in ("input", "output", "scorer"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        if "://" in self.output:
            raise InputError(f"output {self.output} must be a folder of this machine or of a disk that all share")
        for name in ("tokens_per_prompt", "rollouts"):
            at_least(name, getattr(self, name), 1)
        at_least("temperature", self.temperature, 0, above=True)
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must be between 0 and 1, not {self.held_out:g}")


_DESCRIPTION = """\
Make a classifier for the verifier pad: which draft tokens may pass though the target model would not choose them.

--input is the output of drafter generate. Each draft token that its answers reject is a question: texts are continued
with it and without it, and scored. A token that makes answers worse is a pivot. A classifier learns to tell pivots
from the target model's hidden state.

The job writes to --output: labels.parquet, and verifier/ (for --verifier pad --verifier.classifier).

  drafter generate --input gsm8k.jsonl --reading.prompt_column question --output answers
  drafter pivots --input answers --scorer number --target answer --output pivots
  drafter pivots --input answers --scorer score.py:is_right --drafter HEAD --output pivots"""


def parse_config(arguments: Sequence[str] | None = None) -> PivotsConfig:
    parser = make_parser(PivotsConfig, "pivots", "--input DIR --scorer NAME --output DIR", _DESCRIPTION)
    return parse(PivotsConfig, parser, arguments)
