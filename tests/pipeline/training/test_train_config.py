"""Mistakes are named in one line, before anything is trained."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyarrow import fs
from transformers import AutoConfig

from drafter.embedded import EMBEDDED_BASE
from drafter.heads.checkpoint import HEADS
from pipeline.engines.models import model_fingerprint
from pipeline.errors import InputError
from pipeline.training.config import TrainConfig, parse_config
from pipeline.training.job import check_made_by, target_model
from pipeline.training.texts import DistilledTexts, Texts
from tests.pipeline.training.conftest import Train

GOOD = "--input a --output b"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--output b", "input"),
        ("--input a", "output"),
        ("--input a --output b --speed 3", "speed"),
        (f"{GOOD} --training.steps 0", "steps must be at least 1"),
        (f"{GOOD} --training.learning_rate nan", "learning_rate"),
        (f"{GOOD} --training.precision fp8", "training.precision must be one of fp32, bf16"),
        (f"{GOOD} --sharding.zero_stage 4", "sharding.zero_stage must be one of 0, 1, 2, 3"),
        (f"{GOOD} --sharding.micro_batches 0", "sharding.micro_batches must be at least 1"),
        (f"{GOOD} --workers.number 0", "workers.number must be at least 1"),
        (f"{GOOD} --workers.number [3,1]", "the fewest and the most workers"),
        (f"{GOOD} --workers.number [1,4] --training.texts_per_step 7 --sharding.micro_batches 2", "at least 8"),
        (f"{GOOD} --texts.held_out_texts 0", "texts.held_out_texts must be at least 1"),
        (f'{GOOD} --start x --head {{"depth":3}}', "start names a trained head, .*: leave head out"),
        (f"{GOOD} --checkpoint_every 0", "checkpoint_every must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        parse_config(settings.split())
    assert "\n" not in str(refused.value)


def test_the_help_names_the_heads_that_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    (said,) = re.findall(r"Kind of draft head: (.*?)\.", " ".join(capsys.readouterr().out.split()))
    assert set(re.findall(r"`(\w+)`", said)) == HEADS.keys()


def test_a_printed_configuration_can_be_given_back(tmp_path: Path) -> None:
    settings = [*GOOD.split(), "--workers.number", "[1, 3]", "--head", '{"depth": 4}', "--training.precision", "bf16"]
    config = parse_config(settings)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(asdict(config)))
    assert parse_config(["--config", str(file)]) == config
    assert (config.workers.number, config.head) == ((1, 3), {"depth": 4})


Change = Callable[[Path], None]


def rewrite_run(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**run, **changes}))

    return change


def rewrite_rows(change_table: Callable[[pa.Table], pa.Table]) -> Change:
    def change(folder: Path) -> None:
        for file in (folder / "data").iterdir():
            table = pa.parquet.ParquetFile(file).read()
            pa.parquet.write_table(change_table(table), file)

    return change


def delete(name: str) -> Change:
    def change(folder: Path) -> None:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()

    return change


def with_tokens(table: pa.Table, tokens: list[int]) -> pa.Table:
    column = pa.array([tokens] * table.num_rows, pa.list_(pa.int64()))
    return table.set_column(table.schema.get_field_index("token_ids"), "token_ids", column)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (delete("run.json"), {}, "is not the output of drafter distill: it has no run.json"),
        (delete("data"), {}, "has no rows"),
        (rewrite_rows(lambda table: table.slice(0, 0)), {}, "has no rows"),
        (rewrite_run(state="running"), {}, "is not finished"),
        (rewrite_run(base_fingerprint=None), {}, "does not say which target model made it"),
        (
            rewrite_run(lossless=False, verifier="typical"),
            {},
            "was decoded by the verifier 'typical', which is not lossless: distil again with the exact one",
        ),
        (rewrite_rows(lambda table: table.drop_columns(["token_ids"])), {}, "has no column 'token_ids'"),
        (
            rewrite_rows(lambda table: table.set_column(2, "token_ids", table["request_id"])),
            {},
            "several columns|holds string, not lists of token ids",
        ),
        (lambda folder: (folder / "data" / "x.parquet").write_bytes(b"PAR1"), {}, "cannot be read"),
        (lambda folder: None, {"algorithm": "eagle"}, "algorithm must be one of ctc"),
        (lambda folder: None, {"head__wings": 2}, "'wings'"),
        (lambda folder: None, {"head__depth": "deep"}, "'depth' cannot be 'deep'"),
        (lambda folder: None, {"head__hidden_size": 8}, "head: hidden_size is the target model's, 32: leave it out"),
        (lambda folder: None, {"head": "{}", "start": "/nowhere"}, "start: no draft head at '/nowhere'"),
        (lambda folder: None, {"model": "nowhere/to/be/found"}, "is not a folder with a model"),
        # These are found on the cluster.
        (rewrite_rows(lambda table: with_tokens(table, [5, 100_000])), {}, "has token 100000, and the vocabulary ends"),
        (rewrite_rows(lambda table: with_tokens(table, [])), {}, "no text is left to measure β on"),
        (lambda folder: None, {"texts__max_length": 5}, "an answer that begins within texts.max_length, 5 tokens"),
        (lambda folder: None, {"training__texts_per_step": 64}, "34 texts to learn from .* a step takes 64"),
        # And this by the first worker.
        pytest.param(
            rewrite_run(base_fingerprint="0123456789abcdef"),
            {},
            "input was made by another target model .fingerprint 0123456789abc",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_texts_that_cannot_be_learnt_from_are_refused(
    train: Train, distilled: Path, tmp_path: Path, change: Change, settings: dict[str, Any], message: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(distilled, data)
    change(data)
    settings = {"base" if name == "model" else name: value for name, value in settings.items()}
    refused = train(data, **settings)
    assert refused.code == 2
    assert refused.error.startswith("error: ")
    import re

    assert re.search(message, refused.error), refused.error


def made_by(model: str | None, fingerprint: str = "v2-other") -> Texts:
    return Texts([DistilledTexts("distilled", fs.LocalFileSystem(), (), "v2-a", model, fingerprint)], None, "v2-a")


def test_the_target_model_is_that_of_the_texts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, fingerprint = TrainConfig("distilled", "out"), model_fingerprint(str(model))
    assert target_model(config, made_by(str(model))) == (str(model), fingerprint)
    assert target_model(config, made_by(None))[0] == str(EMBEDDED_BASE)
    with pytest.raises(InputError, match="input distilled was made by a model that is not here: give --model"):
        target_model(config, made_by(str(tmp_path / "gone")))
    monkeypatch.chdir(model.parent)
    given = TrainConfig("distilled", "out", model=model.name)
    assert target_model(given, made_by(None)) == (str(model), fingerprint)
    # Another model is told before anything is loaded, and a copy with another chat template may be the same.
    base = AutoConfig.from_pretrained(model)
    check_made_by(given, made_by(str(model), fingerprint), fingerprint, base)
    capsys.readouterr()
    check_made_by(given, made_by(str(model)), fingerprint, base)
    assert "whether tiny has the same weights".replace("tiny", model.name) in capsys.readouterr().err
    with pytest.raises(InputError, match=f"was made by the embedded model, and not by the model {model.name}: a head"):
        check_made_by(given, made_by(None), fingerprint, base)
    check_made_by(given, made_by(str(tmp_path / "gone")), fingerprint, base)


def test_texts_of_two_bases_cannot_go_together(train: Train, distilled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(distilled, other)
    rewrite_run(base_fingerprint="v2-0123456789abcdef")(other)
    refused = train(json.dumps([str(distilled), str(other)]))
    assert refused.code == 2
    assert "input of different target models cannot be used together" in refused.error


def test_an_output_that_holds_something_else_is_refused(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "is not empty and has no run.json" in train(output=tmp_path / "mine").error


@pytest.mark.slow
def test_a_job_that_failed_on_its_settings_is_mended_in_place(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = train(texts__held_out_texts=40)
    assert refused.code == 2
    assert "input holds 0 texts to learn from" in refused.error

    def began(*_: Any) -> None:
        raise InputError("this one began to train")

    monkeypatch.setattr("pipeline.training.job.execute", began)
    mended = train(texts__held_out_texts="null")
    assert mended.error == "error: this one began to train"
    # By default an eighth of few texts is held out.
    counts = json.loads((mended.folder / "_staged" / "texts.json").read_text())["counts"]
    assert (counts["texts"], counts["held_out"]) == (35, 5)
    # It has made no head either, so that other settings may follow.
    assert train(training__learning_rate=1e-4).error == "error: this one began to train"
