"""What decides that an output is a job's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.requests import DRAW
from pipeline.errors import InputError
from pipeline.generate.generate_config import GenerateConfig, parse_config
from pipeline.generate.generate_job import open_output
from pipeline.generate.job_context import job_meaning
from pipeline.io.listing import list_input
from pipeline.io.prompt_source import BATCH, PromptSource
from tests.pipeline.conftest import write_jsonl

TEXT = PromptSource("prompt")


@pytest.mark.parametrize(
    ("settings", "prompts", "draws"),
    [
        ([], TEXT, False),
        (["--sampling.top_k", "5"], TEXT, False),
        (["--sampling.temperature", "0.5"], TEXT, True),
        ([], PromptSource("prompt", own_sampling=True), True),
        ([], BATCH, True),
    ],
)
def test_an_output_is_bound_to_the_draw_if_it_may_have_draws(
    tmp_path: Path, settings: list[str], prompts: PromptSource, draws: bool
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    config: GenerateConfig = parse_config(["--input", str(source), "--output", str(tmp_path / "out"), *settings])
    meaning = job_meaning(config, list_input(str(source)), prompts, "base", {})
    assert meaning.get("draw") == (DRAW if draws else None)
    # An output that was begun before draws had names.
    open_output(config, {name: value for name, value in meaning.items() if name != "draw"})
    (tmp_path / "out" / "data" / "00000-00000.parquet").write_bytes(b"")
    if draws:
        with pytest.raises(InputError, match="draws other tokens from the same seeds"):
            open_output(config, meaning)
    else:
        open_output(config, meaning)
