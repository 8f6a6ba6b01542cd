"""One submission at a time, and none that waits for a dead one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.output.lease import Holder, Lease
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run
from tests.support.waiting import PATIENCE

BEAT = 1.0  # seconds; a holder that is not seen for three of them is thought dead, and a busy machine takes its time


@pytest.fixture
def file(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "_lease.json"))


def nobody(holder: Holder) -> None:
    pytest.fail(f"the lease was lost to {holder}")


def holder(**facts: Any) -> str:
    return json.dumps({"name": "x", "host": socket.gethostname(), "pid": os.getpid(), "beat": 1, **facts})


def test_a_second_submission_is_refused_while_the_first_lives(file: Location) -> None:
    refused = pytest.raises(InputError, match=rf"process {os.getpid()} on .*: wait for its end, or stop it")
    with Lease(file, nobody, BEAT), refused, Lease(file, nobody, BEAT):
        pass
    assert not Path(file.path).exists()
    with Lease(file, nobody, BEAT):
        pass


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_a_dead_submission_is_followed_at_once_or_when_its_file_stands_still(file: Location, host: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file.write_text(holder(host=host, pid=ended.pid))
    with Lease(file, nobody, BEAT):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_who_was_thought_dead_hears_of_the_next(file: Location) -> None:
    lost = threading.Event()
    with Lease(file, lambda by: lost.set(), BEAT):
        file.write_text(holder(name="y", host="another"))
        assert lost.wait(PATIENCE)
    assert json.loads(file.read_text())["name"] == "y"


def test_a_job_on_an_output_in_use_is_refused(run: Run, finished: FinishedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.generate.job.Lease", lambda file, lost: Lease(file, lost, BEAT))
    file = finished.outcome.folder / "_lease.json"
    assert not file.exists()
    finished.reopen()
    with Lease(locate(str(file)), nobody, BEAT):
        refused = run(finished.source, *JOB_SETTINGS)
        assert refused.code == 2
        assert "another submission works on output" in refused.error
    assert run(finished.source, *JOB_SETTINGS).code == 0
