"""Whichever file of an output is torn, the next submission ends well, with the same rows."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from pipeline.engines.ledger import SavedRow, write_unfinished
from pipeline.io.files import Location, locate
from pipeline.output.columns import COLUMNS
from pipeline.output.folder import OutputFolder
from pipeline.output.lease import Holder
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Outcome, Run, untimed
from tests.support.damage import cut, empty, files_below, tear
from tests.support.faults import EndedError, FailingFiles
from tests.support.marks import slow_but

PARTS = [f"00000-{number:06d}" for number in range(5)]
WITH_ERRORS = PARTS[3:]
FINISHED = {
    "README.md",
    "run.json",
    "run.json.copy",
    "status.json",
    "_staged/parts.json",
    "_staged/parts.json.copy",
    *(f"{folder}/{part}.parquet" for folder in ("_staged", "data") for part in PARTS),
    *(f"errors/{part}.parquet" for part in WITH_ERRORS),
}
"""All files of `finished_job`."""
UNFINISHED = FINISHED - {f"data/{PARTS[2]}.parquet"} | {"_lease.json", "_unfinished.parquet"}
"""All files of `unfinished`."""


def torn(*together: str) -> list[Any]:
    """Cases of files that are torn at the same time, with the number of a part at the end of a name.

    None of them is a copy of another, and they are of different parts: one part of each kind (committed or not, with
    errors or none) is enough. The first case is quick.
    """

    def whole(name: str) -> str:
        return f"{name[:-1]}{PARTS[int(name[-1])]}.parquet" if name[-1].isdigit() else name

    cases = [" ".join(map(whole, names.split())) for names in together]
    return [pytest.param(case, marks=() if case is cases[0] else pytest.mark.slow) for case in cases]


@pytest.fixture
def unfinished(finished: FinishedJob) -> FinishedJob:
    """As its driver left it when it ended at once: one part is not committed, though its rows have been generated."""
    finished.reopen()
    folder = finished.outcome.folder
    part = PARTS[2]
    rows = finished.outcome.parts[f"{part}.parquet"]
    names = {column.name for column in COLUMNS} & rows[0].keys()
    saved = [SavedRow(part, row["request_id"], {name: row[name] for name in names}, None, 0) for row in rows]
    write_unfinished(OutputFolder(locate(str(folder))), saved)
    (folder / "data" / f"{part}.parquet").unlink()
    held = {"name": "dead", "host": socket.gethostname(), "pid": 2**22 + 1, "beat": 3}
    (folder / "_lease.json").write_text(json.dumps(held))
    return finished


def assert_same(done: Outcome, before: Outcome) -> None:
    """All rows and errors are there once, and are those of the undamaged job."""
    assert done.code == 0, done.stderr
    assert [untimed(row) for row in done.rows] == [untimed(row) for row in before.rows]
    assert done.errors == before.errors
    json.loads((done.folder / "run.json").read_text())
    assert not {name for name in files_below(done.folder) if "partial" in name or name.startswith("_temporary/")}


@pytest.fixture
def before(finished_job: FinishedJob) -> Outcome:
    """The undamaged output."""
    return finished_job.outcome


def test_these_are_all_files(finished_job: FinishedJob, unfinished: FinishedJob) -> None:
    assert files_below(finished_job.outcome.folder) == FINISHED
    assert files_below(unfinished.outcome.folder) == UNFINISHED


@pytest.mark.slow
@pytest.mark.parametrize(
    "files",
    torn(
        "run.json.copy status.json _staged/parts.json.copy _staged/0",
        "run.json _staged/parts.json data/0 errors/4",
        "data/4 _staged/2 run.json.copy",
    ),
)
def test_torn_files_of_a_finished_output(run: Run, finished: FinishedJob, before: Outcome, files: str) -> None:
    tear(finished.outcome.folder, files, empty)
    assert_same(run(finished.source, *JOB_SETTINGS), before)


@pytest.mark.parametrize(
    "files",
    torn(
        "_staged/2 _lease.json",
        "run.json data/0 errors/4",
        "_unfinished.parquet _staged/parts.json _staged/4",
        "data/4 run.json.copy",
    ),
)
def test_torn_files_of_an_unfinished_output(run: Run, unfinished: FinishedJob, before: Outcome, files: str) -> None:
    tear(unfinished.outcome.folder, files, cut)
    assert_same(run(unfinished.source, *JOB_SETTINGS), before)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FailingFiles]:
    """Have the next submissions of this process find a file system whose changes fail from the n-th on."""

    def fail(fails: BaseException, at: int, *, for_good: bool) -> FailingFiles:
        files = FailingFiles(fails, at, for_good=for_good)
        filesystem = fs.PyFileSystem(files)
        monkeypatch.setattr("pipeline.generate.checks.locate", lambda uri: Location(filesystem, uri))
        return files

    # The submissions that "end" are of this process, which lives.
    monkeypatch.setattr(Holder, "known_dead", property(lambda holder: True))
    return fail


def changes(
    run: Run, source: Path, failing: Callable[..., FailingFiles], fails: BaseException, stride: int = 1, **how: Any
) -> Iterator[Outcome | None]:
    """Submit a job again and again, fail its driver `stride` changes later each time, until it comes to its end.

    Yields:
        What came of each submission; None where it has ended without a word.
    """
    for at in itertools.count(1, stride):
        files = failing(fails, at, **how)
        try:
            outcome = run(source, *JOB_SETTINGS)
        except EndedError:
            outcome = None
        if not files.has_failed:
            return
        yield outcome


WRITES_OF_A_FINISH = 12
"""A submission that only has to say that all rows are there makes more changes than this."""


each_change = pytest.mark.parametrize("stride", slow_but([5], [5, 1]))


@each_change
def test_a_driver_that_ends_at_any_of_its_last_changes_leaves_nothing_behind(
    run: Run, finished: FinishedJob, before: Outcome, failing: Callable[..., FailingFiles], stride: int
) -> None:
    finished.reopen()
    whole = shutil.copytree(finished.outcome.folder, finished.outcome.folder.parent / "whole")
    count = 0
    for _ in changes(run, finished.source, failing, EndedError(), stride, for_good=True):
        count += stride
        failing(EndedError(), 10**9, for_good=True)
        assert_same(run(finished.source, *JOB_SETTINGS), before)
        assert files_below(finished.outcome.folder) == set(FINISHED)
        shutil.rmtree(finished.outcome.folder)
        shutil.copytree(whole, finished.outcome.folder)
    assert count > WRITES_OF_A_FINISH


@each_change
def test_a_full_disk_is_told_in_one_line(
    run: Run, finished: FinishedJob, before: Outcome, failing: Callable[..., FailingFiles], stride: int
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    finished.reopen()
    count = 0
    for told in changes(run, finished.source, failing, full, stride, for_good=False):
        count += stride
        assert told is not None
        assert "Traceback" not in told.stderr
        if told.code:  # it may have been the status alone
            assert "No space left on device" in told.error
            assert told.code == 1 or "cannot be written to" in told.error
        finished.reopen()
    assert count > WRITES_OF_A_FINISH
    failing(full, 10**9, for_good=False)
    assert_same(run(finished.source, *JOB_SETTINGS), before)
    assert files_below(finished.outcome.folder) == set(FINISHED)


@pytest.mark.slow
def test_a_driver_that_ends_at_any_of_its_changes_is_followed_by_one_that_makes_the_same_rows(
    run: Run, finished: FinishedJob, before: Outcome, failing: Callable[..., FailingFiles]
) -> None:
    """Each submission goes on with what the ones before have left, and ends one change later than they did."""
    shutil.rmtree(finished.outcome.folder)
    count = sum(1 for _ in changes(run, finished.source, failing, EndedError(), for_good=True))
    assert count > WRITES_OF_A_FINISH
    failing(EndedError(), 10**9, for_good=True)
    done = run(finished.source, *JOB_SETTINGS)
    assert sorted(row["text"] for row in done.rows) == sorted(row["text"] for row in before.rows)
    assert not {name for name in files_below(done.folder) if "partial" in name or "_lease" in name}


def test_a_list_and_its_copy_that_are_both_torn_are_told(run: Run, finished: FinishedJob) -> None:
    folder = finished.outcome.folder
    for name in ("_staged/parts.json", "_staged/parts.json.copy"):
        empty(folder / name)
    told = run(finished.source, *JOB_SETTINGS)
    assert told.code == 2
    assert "has results but no list of their rows" in told.error
    for name in ("run.json", "run.json.copy"):
        cut(folder / name)
    told = run(finished.source, *JOB_SETTINGS)
    assert told.code == 2
    assert "has a damaged run.json" in told.error


def test_an_input_that_has_changed_is_not_staged_in_place_of_what_was(run: Run, finished: FinishedJob) -> None:
    """The fingerprint of the input is the same, and its rows are not: as in the middle of a large file."""
    folder = finished.outcome.folder
    staged = folder / "_staged" / "parts.json"
    listed = json.loads(staged.read_text())
    listed["parts"][0][1] += 1
    staged.write_text(json.dumps(listed))
    told = run(finished.source, *JOB_SETTINGS)
    assert told.code == 2
    assert "the input is no longer what was staged" in told.error


def test_an_output_of_an_earlier_release_is_refused(run: Run, finished: FinishedJob) -> None:
    file = finished.outcome.folder / "run.json"
    earlier = json.loads(file.read_text())
    del earlier["format"]
    file.write_text(json.dumps(earlier))
    told = run(finished.source, *JOB_SETTINGS)
    assert told.code == 2
    assert "was made by another release" in told.error


@pytest.mark.slow
def test_torn_answers_to_a_batch_are_written_again(run: Run, finished: FinishedJob, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate([{"messages": [{"role": "user", "content": "how many"}]}, {"messages": "none"}])
    ]
    source = tmp_path / "batch.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(source, output=tmp_path / "answered")
    assert done.code == 0, done.stderr
    whole = shutil.copytree(done.folder, tmp_path / "whole")
    answers = ("batch_output.jsonl", "batch_errors.jsonl")
    for files in (" ".join(answers), f"{answers[0]} _staged/{PARTS[0]}.parquet"):  # answers have the input's order
        tear(done.folder, files, cut)
        again = run(source, output=done.folder)
        assert again.code == 0, again.stderr
        for name in answers:
            assert (done.folder / name).read_bytes() == (whole / name).read_bytes()
        assert_same(again, replace(done, folder=whole))
