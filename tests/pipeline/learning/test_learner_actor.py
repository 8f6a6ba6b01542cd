"""The learner's actor, in this process: rows come in, versions go out and to disk, and an error is only said."""

from __future__ import annotations

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
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from pipeline.engines.models import EngineSpec
from pipeline.io.files import locate
from pipeline.learning.config import LearnerSpec, LearningConfig, beginning, learner_spec
from pipeline.learning.feed import Answer
from pipeline.learning.learner_actor import LearnerActor
from pipeline.output.folder import OutputFolder, put_head
from pipeline.settings import LoadingConfig
from tests.support.quick_learner import quick_settings
from tests.support.waiting import PATIENCE, wait_until


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = OutputFolder(locate(str(tmp_path / "out")))
    output.create()
    return output


def spec_of(model: Path, output: OutputFolder, share: float = 1.0) -> LearnerSpec:
    config = LearningConfig(enabled=True, head="new", share=share)
    spec = learner_spec(config, output, output.root.path, str(model), LoadingConfig())
    return replace(spec, training=quick_settings())


def batches() -> Iterator[list[RowSample]]:
    """Rows of a few tokens over and over, four at a time."""
    generator = torch.Generator().manual_seed(0)
    for number in range(1000):
        texts = torch.randint(8, 12, (4, 24), generator=generator)
        yield [RowSample(f"{number}-{place}", text, 8, None) for place, text in enumerate(texts)]


def learn(actor: LearnerActor, number: int) -> Answer:
    """Give rows until there is a version after `number`."""
    rows = batches()

    def answer() -> Answer | None:
        found = actor.exchange([ray.put(next(rows))])
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

    spec = spec_of(model, output)
    assert spec.beginning.saved is not None
    piece = Path(f"{output.learner_state.path}.0123abcd.partial")  # of a learner that was killed while it wrote
    piece.write_bytes(b"{")
    again = LearnerActor(spec)
    # Engines that begin anew have the newest version before anything else is learnt.
    assert wait_until(lambda: again.exchange([]).number, "a version") == report.version
    assert (learn(again, report.version).number or 0) > report.version
    again.close()
    assert not piece.exists()
    provenance = load_head(output.head.path, load_base(model)).provenance
    assert provenance is not None
    assert provenance.training["learnt"]["started_from"] == output.head.path
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("local_ray")
def test_it_rests_after_its_share_of_the_time(model: Path, output: OutputFolder) -> None:
    actor, rows = LearnerActor(spec_of(model, output, share=1e-6)), batches()

    def steps_after_rows() -> int:
        actor.exchange([ray.put(next(rows))])
        return actor.report().steps

    steps = wait_until(steps_after_rows, "a slice of work")
    kept = actor.report().rows
    more = [next(rows) for _ in range(4)]
    actor.exchange([ray.put(some) for some in more])
    # Of what comes meanwhile it learns nothing for days.
    wait_until(lambda: actor.report().rows > kept, "the rows")
    actor.close()
    assert actor.report().steps == steps


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
    report = wait_until(lambda: found if (found := actor.report()).state == "ended" else None, "an error")
    assert "it has had an error" in report.reason
    assert not actor.exchange([]).wants_rows
    assert actor.close().state == "ended"
