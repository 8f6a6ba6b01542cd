"""Where settings come from, and which are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drafter.acceptance.settings import VerifierSettings
from pipeline.errors import InputError
from pipeline.generate.checks import checked_job
from pipeline.generate.config import GenerateConfig, generate_parser, parse_config, parse_distill_config
from tests.support.paths import ROOT


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: a.jsonl\noutput: out\nsampling:\n  temperature: 0.5\n  top_k: 7\n")
    config = parse_config(["--config", str(file), "--sampling.top_k", "3", "--output", "other"])
    assert (config.input, config.output) == ("a.jsonl", "other")
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p) == (0.5, 3, None)


def test_a_printed_configuration_is_a_configuration(tmp_path: Path) -> None:
    config = parse_config(
        ["--input", "a", "--output", "b", "--sampling.stop", '["x", "1"]', "--engine.num_draft_tokens", "5"]
    )
    assert config.sampling.stop == ("x", "1")
    assert parse_config(["--input", "a", "--output", "b", "--sampling.stop", "1"]).sampling.stop == ("1",)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config.as_dict()))
    assert parse_config(["--config", str(file)]) == config
    assert config.as_dict()["engine"]["num_draft_tokens"] == 5


def test_a_verifier_is_named_by_itself_or_with_its_settings(tmp_path: Path) -> None:
    both = ["--input", "a", "--output", "b"]
    assert parse_config(both).verifier == VerifierSettings()
    assert parse_config([*both, "--verifier=typical"]).verifier == VerifierSettings("typical")
    given = parse_config([*both, "--verifier", "fly", "--verifier.theta", "0.5"])
    assert given.verifier == VerifierSettings("fly", {"theta": 0.5})
    for same in (
        ["--verifier.name=fly", "--verifier.settings.theta=0.5"],
        ["--verifier", '{"name": "fly", "settings": {"theta": 0.5}}'],
    ):
        assert parse_config([*both, *same]).verifier == given.verifier
    file = tmp_path / "job.yaml"
    file.write_text("input: a\noutput: b\nverifier: {name: fly, settings: {window: 4}}\n")
    assert parse_config(["--config", str(file)]).verifier == VerifierSettings("fly", {"window": 4})


_TEMPERATURE = "sampling.temperature must be"


def test_a_switch_needs_no_value() -> None:
    for settings in ("--dry_run --output b --learning", "--dry_run=true --output b --learning true --dry_run"):
        config = parse_config(["--input", "a", *settings.split()])
        assert (config.dry_run, config.learning.enabled, config.output) == (True, True, "b")
    assert not parse_config(["--input", "a", "--output", "b", "--dry_run", "false"]).dry_run


@pytest.mark.parametrize("file", ["demo.yaml", "smollm2.yaml"])
def test_the_demo_configurations_are_valid(file: str) -> None:
    config = parse_config(["--config", str(ROOT / "examples" / file)])
    assert (ROOT / config.input).is_file()
    assert config.model is None  # the demonstration names the folder that was fetched
    assert all((ROOT / name).is_dir() for name in config.drafter.split("+") if "/" in name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--input a", "--output is missing: --help shows how"),
        ("", "--input and --output are missing: --help shows how"),
        ("--config .", "is not a file"),
        ("--input= --output b", "input is empty"),
        ("--input a --output b --weather red", "unknown option --weather: --help lists them"),
        ("--input a --output b --max_num_seq 4", "unknown option --max_num_seq: did you mean --engine.max_num_seqs?"),
        ("--input a --output b --max_tokens=4", "unknown option --max_tokens: did you mean --sampling.max_new_tokens?"),
        ("--input a --output b --sampling.temprature 1", "did you mean --sampling.temperature?"),
        ("--input a --output b stray", "unexpected argument 'stray': settings are given as --name value"),
        ("--input a --output b --sampling.temperature=-1", "sampling.temperature must be at least 0, not -1"),
        ("--input a --output b --sampling.temperature nan", f"{_TEMPERATURE} a finite number or null, not nan"),
        ("--input a --output b --sampling.temperature warm", f"{_TEMPERATURE} a finite number or null, not warm"),
        ("--input a --output b --sampling.top_k 1.5", "sampling.top_k must be an integer or null, not 1.5"),
        ("--input a --output b --sampling.stop ['']", "sampling.stop must be a list of non-empty strings"),
        ("--input a --output b --sampling.ignore_eos maybe", "sampling.ignore_eos must be true or false, not maybe"),
        ("--input a --output b --reading.limit 0", "reading.limit must be at least 1, not 0"),
        ("--input a --output b --reading.format xml", "reading.format must be one of auto, jsonl, parquet, csv, text"),
        ("--input a --output b --reading.prompt_column p --reading.messages_column m", "a row has one prompt"),
        ("--input a --output b --engine.max_num_seqs 0", "engine.max_num_seqs must be at least 1, not 0"),
        ("--input a --output b --engine.num_draft_tokens=-1", "engine.num_draft_tokens must be at least 0, not -1"),
        (
            "--input a --output b --resources.min_actors 4 --resources.max_actors 2",
            "max_actors must be at least",
        ),
        ("--input a --output b --resources.cpus_per_actor 0", "resources.cpus_per_actor must be more than 0"),
        ("--input a --output b --resources.gpus_per_actor inf", "resources.gpus_per_actor must be a finite number"),
        (
            "--input a --output b --resources.gpus_per_actor 1.5",
            "resources.gpus_per_actor must be whole above 1, not 1.5",
        ),
        (
            "--input a --output b --resources.gpus_per_actor 2",
            "set engine.tensor_parallel_size, or",
        ),
        ("--input a --output b --writing.rows_per_file 0", "writing.rows_per_file must be at least 1, not 0"),
        ("--input a --output b --loading.dtype int8", "loading.dtype must be one of auto, float32, bfloat16, float16"),
        ("--input a --output b --verifier.settings low", "verifier.settings must be an object, not low"),
        ("--config nowhere.yaml", "nowhere.yaml' does not exist"),
    ],
)
def test_bad_settings_are_named(settings: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(settings.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("input: a\noutput: b\ncolour: red\n", "unknown setting colour: --help lists them"),
        (
            "input: a\noutput: b\nsampling:\n  temprature: 1\n",
            "unknown setting sampling.temprature: did you mean sampling.temperature?",
        ),
        (
            "input: a\noutput: b\nsampling:\n  max_tokens: 1\n",
            "unknown setting sampling.max_tokens: did you mean sampling.max_new_tokens?",
        ),
        (
            "input: a\noutput: b\nsampling:\n  structured_outputs: 1\n",
            "sampling.structured_outputs must be a group of settings or null, not 1",
        ),
        ("input: a\noutput: b\nsampling:\n", "sampling must be a group of settings, not None"),
        ("input: a\noutput: b\nsampling: []\n", "sampling must be a group of settings, not []"),
        ("input: a\noutput: [b\n", "line 2"),
        ("just words\n", "words"),
        ("input: a\noutput: b\nengine: 3\n", "engine"),
        ("input: a\noutput: b\nverifier: fly\n", "verifier must be a group of settings, such as {name: …}"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    for parse in (parse_config, parse_distill_config):
        with pytest.raises(InputError) as caught:
            parse(["--config", str(file)])
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"), [("verifier", "typical"), ("rollout", "programs:mend"), ("loading.adapter", "a")]
)
def test_what_no_head_can_learn_from_is_not_distilled(setting: str, value: str) -> None:
    settings = ["--input", "i", "--output", "o", f"--{setting}", value]
    assert parse_config(settings)
    with pytest.raises(InputError, match=f"^{setting} {value}: drafter train cannot learn from such answers"):
        parse_distill_config(settings)


def test_the_command_explains_itself_and_fails_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help-all"])
    assert not ended.value.code
    page = capsys.readouterr().out
    for field in GenerateConfig.__dataclass_fields__:
        assert f"--{field}" in page
    assert "--reading.prompt_column" in page
    assert len(re.findall(r"^ +(?:-h, )?--\w", generate_parser().format_help(), re.MULTILINE)) <= 35
    command = [sys.executable, "-m", "jobs.generate", "--input", "nowhere", "--output", "x"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "checking nowhere and the model\nerror: input nowhere does not exist\n"


def test_how_tokens_are_chosen_is_said_and_the_models_path_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "how many"}\n')
    monkeypatch.chdir(model.parent)
    given = ["--input", str(source), "--output", str(tmp_path / "out"), "--model", model.name]
    for temperature, said in (
        ([], "chosen greedily (temperature 0)"),
        (["--sampling.temperature", "0.7"], "sampled at temperature 0.7"),
    ):
        job = checked_job(parse_config([*given, *temperature]))
        assert f"tokens are {said}\n" in capsys.readouterr().err
        job.save_run("running")
        # Training on the output takes the model from there, whatever folder it is started in.
        assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["model"] == str(model)


@pytest.mark.parametrize(
    ("row", "given", "column"),
    [
        ({"prompt": "x"}, [], None),
        ({"prompt": "x", "id": "doc17:3"}, [], "id"),
        ({"prompt": "x", "id": "doc17:3"}, ["--reading.id_column", ""], None),
        ({"prompt": "x", "name": "doc17:3"}, ["--reading.id_column", "name"], "name"),
        ({"custom_id": "doc17:3", "url": "/v1/completions", "body": {}}, [], "custom_id"),
    ],
)
def test_what_names_the_rows_is_kept(
    model: Path, tmp_path: Path, row: dict[str, object], given: list[str], column: str | None
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    folders = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--model", str(model)]
    checked_job(parse_config([*folders, *given])).save_run("running")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["named_by"] == column
