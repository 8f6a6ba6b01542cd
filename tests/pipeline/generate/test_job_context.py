"""What decides that an output is a job's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.requests import DRAW
from pipeline.errors import InputError
from pipeline.generate.config import GenerateConfig, parse_config
from pipeline.generate.job import check_verifier, open_output
from pipeline.generate.job_context import job_meaning
from pipeline.io.listing import list_input
from pipeline.io.prompt_source import BATCH, PromptSource
from tests.pipeline.conftest import write_jsonl

TEXT = PromptSource("prompt")


def test_what_was_decoded_leniently_is_not_gone_on_with_exactly(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    meanings = {}
    for name in ("exact", "fly"):
        given = ["--input", str(source), "--output", str(tmp_path / name), "--verifier", name]
        config = parse_config(given)
        meanings[name] = job_meaning(config, list_input(str(source)), TEXT, "base", {})
        open_output(config, meanings[name])
        (tmp_path / name / "data" / "00000-00000.parquet").write_bytes(b"")
    assert "verifier" not in meanings["exact"]  # as in outputs from before there was a choice
    for name, other in (("exact", "fly"), ("fly", "exact")):
        config = parse_config(["--input", str(source), "--output", str(tmp_path / name), "--verifier", other])
        with pytest.raises(InputError, match=r"belongs to another job \(verifier was"):
            open_output(config, meanings[other])


@pytest.mark.parametrize(
    ("settings", "verifier", "message"),
    [
        ([], "fly", None),
        (["--sampling.temperature", "0.5"], "fly", "the verifier fly decodes greedily, and temperature is 0.5"),
        (["--sampling.temperature", "0.5"], "typical", None),
        (["--verifier.theta", "0.5"], "typical", "the verifier typical has no theta: it has epsilon, delta"),
        (["--verifier.theta", "0.5"], "exact", "the verifier exact has no theta: it has no settings"),
        (["--verifier.window", "0"], "fly", "verifier fly: window must be at least 1, not 0"),
        (["--verifier.theta", ".inf"], "fly", "verifier fly: theta must be a finite number"),
    ],
)
def test_a_verifier_that_cannot_do_the_job_is_refused(settings: list[str], verifier: str, message: str | None) -> None:
    config = parse_config(["--input", "a", "--output", "b", "--verifier", verifier, *settings])
    if message is None:
        check_verifier(config)
    else:
        with pytest.raises(InputError) as caught:
            check_verifier(config)
        assert message in str(caught.value)


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
