"""Configuration and command line of the job that makes a table of n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError


@dataclass(frozen=True)
class CorpusConfig:
    """The texts to count.

    Args:
        format: Format of the input files; `auto` goes by their names.
        split: Split of a Hugging Face dataset, such as `train`; by default the only one.
        subset: Subset of a Hugging Face dataset; by default the only one, or `default`.
        column: Column of texts, chats (lists of {role, content}) or token ids of this model's tokeniser; by default
            the generated tokens of an output of `drafter generate`, otherwise the first of `text`, `prompt`,
            `messages` and `token_ids` that there is.
        limit: Take at most this many rows.
    """

    format: Literal["auto", "jsonl", "parquet", "csv", "text", "arrow"] = "auto"
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class CacheConfig:
    """A job that makes a table of n-grams.

    Args:
        input: The corpus: a file, a folder, a pattern, a URI, or the output of `drafter generate`.
        output: File for the table; one that is there is replaced.
        model: Target model, whose tokeniser's ids the table has: hub id or folder; by default the embedded one.
        trust_remote_code: Run code that comes with the tokeniser.
        reading: Which texts are counted.
        leaders: Largest number of tokens with followers in the table; the most frequent ones are kept.
        followers: Largest number of followers of a token; the most frequent ones are kept. Each is three tokens.
    """

    input: str
    output: str
    model: str | None = None
    trust_remote_code: bool = False
    reading: CorpusConfig = field(default_factory=CorpusConfig)
    leaders: int = 65_536
    followers: int = 8

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty")
        if "://" in self.output:
            raise InputError(f"output {self.output} is a URI: every engine reads the table from a path, so give one")
        at_least("reading.limit", self.reading.limit, 1)
        at_least("leaders", self.leaders, 1)
        at_least("followers", self.followers, 1)


_DESCRIPTION = """\
Count which tokens follow each other in a corpus, and write the most frequent n-grams to a file: a
frozen table for the drafter cacheback, which asks it after the texts that it decodes.

The corpus is any input of drafter generate with texts, chats or token ids in a column, or the output of
such a job. The table belongs to the tokeniser of --model.

  drafter cache --input 'texts/*.parquet' --reading.column text --output table.safetensors
  drafter cache --input results --model MODEL --output table.safetensors
  drafter generate --drafter cacheback:table.safetensors --model MODEL --input … --output …"""


def parse_config(arguments: Sequence[str] | None = None) -> CacheConfig:
    return parse(CacheConfig, make_parser(CacheConfig, "cache", "--input PATH --output FILE", _DESCRIPTION), arguments)
