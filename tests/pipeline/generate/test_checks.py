"""What decides that an output is a job's own."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from drafter import plugins
from drafter.acceptance.contract import ExactVerifier
from drafter.requests import DRAW
from pipeline.errors import InputError
from pipeline.generate.checks import SETTINGS, check_verifier, job_meaning, open_output, output_date
from pipeline.generate.config import GenerateConfig, parse_config
from pipeline.io.listing import BATCH, PromptSource
from tests.pipeline.conftest import write_jsonl
from tests.support.paths import ROOT

TEXT = PromptSource("prompt")


class Careful(ExactVerifier):
    def __init__(self, threshold: float) -> None:
        assert threshold == 0.5


def test_what_was_decoded_leniently_is_not_gone_on_with_exactly(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    meanings = {}
    for name in ("exact", "fly"):
        given = ["--input", str(source), "--output", str(tmp_path / name), "--verifier", name]
        config = parse_config(given)
        meanings[name] = job_meaning(config, TEXT, "base", {})
        open_output(config, meanings[name])
        (tmp_path / name / "data" / "00000-00000.parquet").write_bytes(b"")
    for name, other in (("exact", "fly"), ("fly", "exact")):
        config = parse_config(["--input", str(source), "--output", str(tmp_path / name), "--verifier", other])
        with pytest.raises(InputError, match=r"belongs to another job \(verifier\.name was"):
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
        (["--verifier.theta", "low"], "fly", "'theta' cannot be 'low': it must be a valid number"),
        ([], "loose", "no verifier 'loose': there are exact, fly, pad, typical"),
        (["--verifier.threshold", "0.5"], "careful", None),
        (["--verifier.theta", "0.5"], "careful", "the verifier careful has no theta: it has threshold"),
    ],
)
def test_a_verifier_that_cannot_do_the_job_is_refused(
    settings: list[str], verifier: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verifier == "careful":  # somebody else's
        found = {**plugins.methods(), "theirs": plugins.Method(verifiers={"careful": f"{__name__}:Careful"})}
        monkeypatch.setattr(plugins, "methods", lambda: found)
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
    meaning = job_meaning(config, prompts, "base", {})
    assert meaning.get("draw") == (DRAW if draws else None)
    # An output that was begun with another draw.
    open_output(config, {**meaning, "draw": "another"} if draws else meaning)
    (tmp_path / "out" / "data" / "00000-00000.parquet").write_bytes(b"")
    if draws:
        with pytest.raises(InputError, match="draws other tokens from the same seeds"):
            open_output(config, meaning)
    else:
        open_output(config, meaning)


@pytest.mark.parametrize(
    ("source", "output", "taken"),
    [
        ("in", "in/out", "data/00000-000000.parquet"),
        ("in", "link/out", "data/00000-000000.parquet"),
        ("link", "in/out", "data/00000-000000.parquet"),
        ("in", "in/away/out", "data/00000-000000.parquet"),
        ("in/**/*.parquet", "in/out", "data/00000-000000.parquet"),
        ("in/*/data/*.parquet", "link/out", "data/00000-000000.parquet"),
        ("**/*.parquet", "out", "data/00000-000000.parquet"),
        ("in/**/errors/*", "in/out", "errors/00000-000000.parquet"),
        ("in/**/001-*", "in/out", "data/001-00000-000000.parquet"),
        ("in/**/*.json", "in/out", "run.json"),
        ("in/**/*.md", "in/out", "README.md"),
        ("**/*.jsonl", "out", "batch_output.jsonl"),
        ("in/*.parquet", "in/out", None),
        ("in/**/*.parquet", "in/_out", None),
        ("in/**/*.csv", "in/out", None),
        ("in/**/*.parquet", "inside/out", None),
        ("in", "in/../out", None),
    ],
)
def test_an_output_that_would_become_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, taken: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "in" / "away").symlink_to("../elsewhere")
    config = parse_config(["--input", source, "--output", output])
    if taken is None:
        open_output(config, job_meaning(config, TEXT, "base", {}), batch=True)
    else:
        with pytest.raises(InputError) as caught:
            open_output(config, job_meaning(config, TEXT, "base", {}), batch=True)
        assert f"{output} lies in the input {source}, which takes in files such as its {taken}" in str(caught.value)


def test_only_answers_to_a_batch_are_lines(tmp_path: Path) -> None:
    config = parse_config(["--input", f"{tmp_path}/**/*.jsonl", "--output", str(tmp_path / "out")])
    open_output(config, job_meaning(config, TEXT, "base", {}))


OTHERS: dict[str, list[str]] = {
    "sampling.temperature was 0.0, is now 0.7": ["--sampling.temperature", "0.7"],
    "sampling.stop was [], is now ['a']": ["--sampling.stop", "[a]"],
    "reading.chat was None, is now False": ["--reading.chat", "false"],
    "loading.dtype was 'auto', is now 'float32'": ["--loading.dtype", "float32"],
    "loading.dequantize was None, is now True": ["--loading.dequantize", "true"],
    "engine.max_model_len was None, is now 64": ["--engine.max_model_len", "64"],
}


def resolved(arguments: list[str]) -> GenerateConfig:
    """Return a configuration as a job has it, once a model without settings of its own has given the defaults."""
    config = parse_config(arguments)
    return dataclasses.replace(config, sampling=config.sampling.over())


@pytest.mark.parametrize("told", OTHERS)
def test_a_submission_with_another_setting_is_told_which(tmp_path: Path, told: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    given = ["--input", str(source), "--output", str(tmp_path / "out")]
    before, now = resolved(given), resolved([*given, *OTHERS[told]])
    open_output(before, job_meaning(before, TEXT, "base", {}))
    (tmp_path / "out" / "data" / "00000-00000.parquet").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        open_output(now, job_meaning(now, TEXT, "base", {}))
    assert f"belongs to another job ({told}): choose another output" in str(caught.value)


FREE = [
    *("--drafter", "memory", "--engine.max_num_seqs", "3", "--engine.num_draft_tokens", "5", "--engine.kv_gib", "1"),
    *("--resources.max_actors", "2", "--limits.row_seconds", "9", "--writing.rows_per_file", "2"),
    *("--loading.device", "cpu"),
]


def test_a_submission_may_have_other_sizes_and_another_drafter_if_the_verifier_is_exact(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    for verifier in ("exact", "fly"):
        given = ["--input", str(source), "--output", str(tmp_path / verifier), "--verifier", verifier]
        before, now = parse_config([*given, "--drafter", "ctc"]), parse_config([*given, *FREE])
        open_output(before, job_meaning(before, TEXT, "base", {"ctc": "1"}))
        (tmp_path / verifier / "data" / "00000-00000.parquet").write_bytes(b"")
        meaning = job_meaning(now, TEXT, "base", {})
        if verifier == "exact":
            open_output(now, meaning)
        else:
            with pytest.raises(InputError, match=r"\(drafter was 'ctc', is now 'memory'; heads"):
                open_output(now, meaning)


def test_every_setting_is_bound_or_free_and_the_documentation_says_which() -> None:
    config = parse_config(["--input", "a", "--output", "b"]).as_dict()
    groups = {name.partition(".")[0] for name in SETTINGS}
    assert groups == config.keys()
    table = (ROOT / "docs" / "operations.md").read_text().partition("| setting |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    told = {name: row[1] for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    assert {name: told.get(name) for name in SETTINGS} == {
        name: {"bound": "no", "rows": "rows", "free": "yes"}[binding] for name, binding in SETTINGS.items()
    }


def test_one_output_has_one_date(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    given = ["--input", str(source), "--output", str(tmp_path / "out")]
    config = parse_config(given)
    assert output_date(parse_config([*given, "--reading.date", "2026-03-31"])) == "2026-03-31T00:00:00"
    with pytest.raises(InputError, match=r"reading\.date must be as 2026-03-31 or 2026-03-31T12:00, not 'today'"):
        parse_config([*given, "--reading.date", "today"])
    begun = "2024-02-03T04:05:06"
    open_output(config, job_meaning(config, TEXT, "base", {}, begun))
    assert output_date(config) > "2025"  # as long as there is no result
    (tmp_path / "out" / "data" / "00000-00000.parquet").write_bytes(b"")
    assert output_date(config) == begun
    now = parse_config([*given, "--reading.date", "2026-03-31"])
    with pytest.raises(InputError, match=r"reading\.date was '2024-02-03T04:05:06', is now '2026-03-31T00:00:00'"):
        open_output(now, job_meaning(now, TEXT, "base", {}, output_date(now)))
