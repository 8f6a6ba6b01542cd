"""The distillation job: the generation job with defaults for training text of a draft head."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.command_line import parse
from pipeline.generate.config import GenerateConfig, generate_parser

_DESCRIPTION = """\
Let the target model answer prompts itself, to get the text that its draft head learns from.

This is jobs.generate with longer answers by default: the same input, output and settings, and
submitting the same command again goes on where the job stopped. jobs.train takes the output.

  python -m jobs.distill --input prompts.jsonl --output distilled
  python -m jobs.distill --input prompts.jsonl --output distilled-sampled --sampling.temperature 0.8
  python -m jobs.distill --config examples/distill.yaml"""
_DEFAULTS = {"sampling.max_new_tokens": 1024}


def parse_config(arguments: Sequence[str] | None = None) -> GenerateConfig:
    """Parse the distillation job's command line; see `command_line.parse`."""
    parser = generate_parser("jobs.distill", _DESCRIPTION)
    parser.set_defaults(_DEFAULTS)
    return parse(GenerateConfig, parser, arguments)
