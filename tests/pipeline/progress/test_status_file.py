"""The status file of submissions that fail, stop, finish and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from drafter.statistics import BatchChoice, MemberView, StepSums, Verdict
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.errors import JobError
from pipeline.io.files import Location
from pipeline.progress.board import Progress
from pipeline.progress.watch import StatusFile
from tests.pipeline.conftest import FinishedJob


def place(folder: Path) -> Location:
    return Location(fs.LocalFileSystem(), str(folder / "status.json"))


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def test_status_of_submissions_that_fail_stop_and_finish(tmp_path: Path) -> None:
    rates: dict[str, Any] = {
        "recent_row_rate": 2.0,
        "engines": 2,
        "engine_seconds": 6.0,
        "memory_tokens": 70,
        "memory_bytes": 800,
        "choices": (
            BatchChoice(
                4,
                "memory",
                3,
                (MemberView("memory"), MemberView("ngram", "memory", 0.6)),
                Verdict(7, 0.1, 0.3),
                StepSums(steps=9, timed=9, row_steps=36, spec_row_steps=30, seconds=2.0, plain_seconds=3.0),
            ),
        ),
    }
    half = Progress("generating", 10, rows=4, errors=1, tokens=40, steps=20, **rates)

    def fails(status: StatusFile) -> None:
        assert read(tmp_path)["state"] == "starting"
        status.takes(ActorResources(cpus=3.0, gpus=0.5, min_actors=1, max_actors=2))
        status.show(half)
        now = read(tmp_path)
        assert (now["state"], now["rows_done"], now["rows_total"], now["errors"]) == ("generating", 4, 10, 1)
        assert (now["eta_seconds"], now["mean_acceptance_length"], now["engines"]) == (3.0, 2.0, 2)
        assert (now["memory_tokens"], now["memory_bytes"]) == (70, 800)
        (choice,) = now["speculation"]["by_rows"]
        assert (choice["rows"], choice["chosen"], choice["explored"]) == (4, "memory", 3)
        assert choice["members"] == [{"name": "ngram", "beside": "memory", "relative": 0.6}]
        assert now["speculation"]["sentences"][-1].startswith("Not chosen in the end: ngram (0.60 times")
        raise JobError("the cluster\nis gone")

    with pytest.raises(JobError), StatusFile(place(tmp_path)) as status:
        fails(status)
    now = read(tmp_path)
    assert (now["state"], now["failure"], now["rows_done"]) == ("failed", "the cluster is gone", 4)

    with pytest.raises(KeyboardInterrupt), StatusFile(place(tmp_path)):
        raise KeyboardInterrupt
    assert read(tmp_path)["state"] == "stopped"

    with StatusFile(place(tmp_path)) as status:
        status.show(Progress("generating", 10, before=4, errors_before=1, rows=6, crash="device lost"))
    now = read(tmp_path)
    assert (now["state"], now["rows_done"], now["errors"], now["eta_seconds"]) == ("finished", 10, 1, 0.0)
    assert (now["failure"], now["last_crash"]) == (None, "device lost")
    # What each submission took is kept.
    assert [one["rows"] for one in now["submissions"]] == [4, 0, 6]
    assert [one["gpu_seconds"] for one in now["submissions"]] == [3.0, 0.0, 0.0]
    assert [one["cpu_seconds"] for one in now["submissions"]] == [18.0, 0.0, 0.0]
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]


def test_a_status_that_cannot_be_written_does_not_stop_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StatusFile(place(tmp_path / "missing")) as status:
        status.show(Progress("generating"))
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_status_of_a_job(finished_job: FinishedJob) -> None:
    done = finished_job.outcome
    now = read(done.folder)
    assert (now["state"], now["rows_total"], now["rows_done"], now["errors"]) == ("finished", 9, 9, 2)
    tokens = sum(row["num_output_tokens"] for row in done.rows)
    assert [(one["rows"], one["tokens"]) for one in now["submissions"]] == [(9, tokens)]
    assert now["submissions"][0]["gpu_seconds"] == 0
    assert now["submissions"][0]["cpu_seconds"] > 0
    beta = tokens / sum(row["num_decode_steps"] for row in done.rows)
    assert now["mean_acceptance_length"] == pytest.approx(beta, abs=1e-4)
