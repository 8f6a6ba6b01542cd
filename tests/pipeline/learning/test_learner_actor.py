"""The learner's actor, in this process: rows come in, versions go out and to disk, and an error is only said."""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch
from safetensors import SafetensorError

from drafter.embedded import EMBEDDED_HEADS
from drafter.engine.config import EngineConfig
from drafter.heads.checkpoint import load_head
from drafter.methods.learning.drafter import version_of
from drafter.methods.learning.learner import Learner
from drafter.methods.learning.rows import RowSample, SampleTap
from drafter.methods.learning.settings import LearnerSettings
from drafter.statistics import BatchChoice, MemberView, StepSums
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from pipeline.engines.models import EngineSpec
from pipeline.io.files import locate
from pipeline.learning.config import LearnerSpec, LearningConfig, beginning
from pipeline.learning.feed import Answer, EngineBeat
from pipeline.learning.learner_actor import LearnerActor
from pipeline.learning.record import LearningRecord, read_record
from pipeline.output.folder import OutputFolder, put_head
from pipeline.progress.board import Moment
from tests.support.waiting import PATIENCE, wait_until

SETTINGS = LearnerSettings(
    texts_per_step=2,
    anchors_per_text=4,
    held_out_share=0.3,
    held_out_rows=2,
    least_held_out=1,
    evaluate_every=2,
    least_gain=1.0,
    teacher=0,
)


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = OutputFolder(locate(str(tmp_path / "out")))
    output.create()
    return output


def spec_of(model: Path, output: OutputFolder) -> LearnerSpec:
    config = LearningConfig(enabled=True, head="new", must_pay=False, cpus=1, training=SETTINGS)
    return LearnerSpec(config, beginning(config, output), output, output.root.path, str(model), "auto", False)


def batches() -> Iterator[list[RowSample]]:
    """Rows of a few tokens over and over, four at a time."""
    generator = torch.Generator().manual_seed(0)
    for number in range(1000):
        texts = torch.randint(8, 12, (4, 24), generator=generator)
        yield [RowSample(f"{number}-{place}", text, 8, None, 16) for place, text in enumerate(texts)]


def learn(actor: LearnerActor, number: int) -> Answer:
    """Give rows until there is a version after `number`."""
    rows, told = batches(), EngineBeat(0, 0)

    def answer() -> Answer | None:
        nonlocal told
        told = EngineBeat(told.tokens + 64, told.row_steps + 64)
        found = actor.exchange("engine", told, [ray.put(next(rows))])
        return found if (found.number or 0) > number else None

    return wait_until(answer, f"a version after {number}")


@pytest.mark.usefixtures("local_ray")
def test_rows_become_versions_and_another_process_goes_on(
    model: Path, output: OutputFolder, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    actor = LearnerActor(spec_of(model, output))
    first = learn(actor, 0)
    report = actor.close()
    assert report.state == "learning"
    assert report.version is not None
    assert report.version >= (first.number or 0) >= 1
    weights = ray.get(first.weights[0])
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())

    head = load_head(output.head.path, load_base(model))
    assert version_of(head) == report.version
    assert weights.keys() == head.state_dict().keys()
    record = LearningRecord.of_json(output.learning_file.read_text())
    assert record.versions[-1].number == report.version

    spec = spec_of(model, output)
    assert spec.beginning.saved is not None
    again = LearnerActor(spec)
    # Engines that begin anew have the newest version before anything else is learnt.
    assert wait_until(lambda: again.exchange("new", EngineBeat(0, 0), []).number, "a version") == report.version
    assert (learn(again, report.version).number or 0) > report.version
    numbers = [one.number for one in LearningRecord.of_json(output.learning_file.read_text()).versions]
    again.close()
    assert numbers == sorted(set(numbers))
    provenance = load_head(output.head.path, load_base(model)).provenance
    assert provenance is not None
    assert provenance.training["learnt"]["started_from"] == output.head.path
    assert not list(temporary.iterdir())


def test_what_was_decoded_before_the_learner_was_ready_is_of_no_interval(
    model: Path, output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()

    def load_later(*args: Any, **settings: Any) -> BaseModel:
        assert may_load.wait(PATIENCE)
        return load_base(*args, **settings)

    monkeypatch.setattr("pipeline.learning.learner_actor.load_base", load_later)
    monkeypatch.setattr("pipeline.learning.learner_actor._INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("pipeline.learning.learner_actor._SAVE_SECONDS", 0.0)
    actor = LearnerActor(spec_of(model, output))
    for tokens in (10**6, 2 * 10**6):
        actor.exchange("engine", EngineBeat(tokens, tokens), [])
    may_load.set()
    wait_until(lambda: actor.report(None).state != "starting", "the base")
    actor.exchange("engine", EngineBeat(2 * 10**6 + 64, 2 * 10**6 + 32), [])

    def moments() -> list[Moment]:
        return LearningRecord.of_json(output.learning_file.read_text()).moments

    wait_until(lambda: output.learning_file.exists and moments(), "an interval")
    assert moments()[0].seconds > 0.25
    # An endpoint's engines are idle now and then, whoever learns: the time in which they were does not count.
    actor.report(math.inf)
    views = MemberView("ngram", 100.0, 7, 100.0), MemberView("head", 80.0, 7, 80.0)
    choices = (BatchChoice(4, "ngram", 1, views, sums=StepSums(steps=9)),)
    actor.exchange("engine", EngineBeat(2 * 10**6 + 74, 2 * 10**6 + 42, choices, busy=0.25), [])
    wait_until(lambda: len(moments()) > 1, "another interval")
    actor.close()
    assert [(one.tokens, one.row_steps) for one in moments()] == [(64, 32), (10, 10)]
    assert moments()[1].seconds == 0.25
    assert read_record(output).balance.lead == pytest.approx(0.8)  # the head has others to outrun


def test_a_short_job_is_not_burdened_with_a_model_that_learns(
    model: Path, output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Mock(side_effect=RuntimeError("loaded"))
    monkeypatch.setattr("pipeline.learning.learner_actor.load_base", loads)
    for name in ("_INTERVAL_SECONDS", "_SLICE_SECONDS"):
        monkeypatch.setattr(f"pipeline.learning.learner_actor.{name}", 0.01)
    spec = spec_of(model, output)
    actor = LearnerActor(replace(spec, config=replace(spec.config, must_pay=True)))
    made = itertools.count(0, 100)

    def reason(tokens_left: float, expected: str) -> bool:
        number = next(made)
        actor.exchange("engine", EngineBeat(number, number, busy=float(number)), [])
        return expected in actor.report(tokens_left).reason

    wait_until(lambda: reason(1.0, "0.0 s of 0 s left"), "a decision")
    assert not loads.called
    wait_until(lambda: reason(1e12, "loaded"), "another one, that it pays")
    actor.close()


def test_a_saved_head_that_cannot_be_loaded_is_left_out(
    model: Path, output: OutputFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    put_head(EMBEDDED_HEADS / "ctc", output.head)  # it belongs to another base
    begins = beginning(LearningConfig(enabled=True, head="new"), output)
    assert begins.saved is not None
    with EngineSpec(str(model), "auto", {}, EngineConfig(max_num_seqs=2), 1, learning=begins).load() as lm:
        assert isinstance(lm.samples, SampleTap)
        assert lm.engine.state().drafter_version is None
    assert "the head that was learnt is left out: draft head" in capsys.readouterr().err


def test_the_end_does_not_wait_for_a_model_that_is_being_loaded(
    model: Path, output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, may_load = threading.Event(), threading.Event()

    def load_late(*args: Any, **settings: Any) -> BaseModel:
        loads.set()
        assert may_load.wait(PATIENCE)
        return load_base(*args, **settings)

    monkeypatch.setattr("pipeline.learning.learner_actor.load_base", load_late)
    actor = LearnerActor(spec_of(model, output))
    assert loads.wait(PATIENCE)
    assert actor.close().reason == "it loads the model"
    may_load.set()
    assert output.learning_file.exists


@pytest.mark.usefixtures("local_ray")
def test_engines_get_a_version_that_cannot_be_written(
    model: Path, output: OutputFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Learner, "save", Mock(side_effect=SafetensorError("no space left")))
    actor = LearnerActor(spec_of(model, output))
    learn(actor, 0)
    assert actor.close().state == "learning"
    assert "the head cannot be written: no space left" in capsys.readouterr().err


def test_an_error_ends_the_learner_and_nothing_else(tmp_path: Path, output: OutputFolder) -> None:
    actor = LearnerActor(spec_of(tmp_path / "no-model", output))
    report = wait_until(lambda: found if (found := actor.report(None)).state == "ended" else None, "an error")
    assert "it has had an error" in report.reason
    assert not actor.exchange("engine", EngineBeat(1, 1), []).wants_rows
    assert actor.close().state == "ended"
