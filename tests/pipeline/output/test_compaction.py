"""Small files become large ones, and no moment of it loses or doubles a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from pipeline.io.files import Location, locate
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import compact, merges
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run, read_rows

PARTS = [f"00000-{number:06d}" for number in range(5)]
WHOLE = f"{PARTS[0]}-to-{PARTS[-1]}.parquet"
"""File that all of these parts are merged into."""


def write_parts(folder: Path) -> OutputFolder:
    output = OutputFolder(locate(str(folder)))
    output.create()
    for number, part in enumerate(PARTS):
        rows = {"request_id": [f"{part}:{row}" for row in range(number)], "n": list(range(number))}
        schema = pa.schema([("request_id", pa.string()), ("n", pa.int64())])
        pa.parquet.write_table(pa.table(rows, schema=schema), folder / "data" / f"{part}.parquet")
    for part in PARTS[1:3]:
        pa.parquet.write_table(pa.table({"request_id": [f"{part}:bad"]}), folder / "errors" / f"{part}.parquet")
    return output


def rows(folder: Path) -> list[str]:
    return [row["request_id"] for path in sorted(folder.iterdir()) for row in read_rows(path)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_neighbours_are_merged_until_they_are_large_enough(sizes: list[int], target: int) -> None:
    files = [(f"{number:02d}", size) for number, size in enumerate(sizes)]
    planned = merges(files, target)
    merged = [name for group in planned.values() for name in group]
    assert merged == [name for name, _ in files if name in set(merged)]
    size = dict(files)
    for group in planned.values():
        assert len(group) > 1
        assert sum(size[name] for name in group[:-1]) < target
    for name in set(size) - set(merged):  # what stays alone is large, or the last
        assert size[name] >= target or name == files[-1][0]


def test_a_folder_of_parts(tmp_path: Path) -> None:
    output = write_parts(tmp_path)
    before = rows(tmp_path / "data")
    compact(output, 1 << 20)
    assert names(tmp_path / "data") == [WHOLE]
    assert names(tmp_path / "errors") == [f"{PARTS[1]}-to-{PARTS[2]}.parquet"]
    assert rows(tmp_path / "data") == before
    assert output.committed() == set(PARTS)
    merged = pyarrow.parquet.ParquetFile(tmp_path / "data" / WHOLE)
    assert merged.num_row_groups == 1


def test_without_a_target_nothing_happens(tmp_path: Path) -> None:
    output = write_parts(tmp_path)
    compact(output, None)
    assert names(tmp_path / "data") == [f"{part}.parquet" for part in PARTS]
    assert output.compaction() is None


class KilledError(BaseException):
    """Stands for the end of the process."""


class Fuse:
    """Ends the process after so many moments; each change of the files has one before it and one after it.

    Args:
        moments: How many are survived.
    """

    def __init__(self, moments: int) -> None:
        self._left = moments

    def _burn(self) -> None:
        if self._left == 0:
            raise KilledError
        self._left -= 1

    def __call__(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """`action` with the moments around it."""

        def watched(*arguments: Any, **named: Any) -> Any:
            self._burn()
            result = action(*arguments, **named)
            self._burn()
            return result

        return watched


class WatchedFiles:
    """A file system with a fuse on all that changes it."""

    def __init__(self, real: fs.FileSystem, fuse: Fuse) -> None:
        self._real = real
        self.move, self.delete_file = fuse(real.move), fuse(real.delete_file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_death_at_any_moment_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at each write, rename and deletion in turn, before it and after it, and go on."""
    monkeypatch.setattr("pipeline.output.part_files._THREADS", 1)
    moments, finished = 0, False
    while not finished:
        folder = tmp_path / str(moments)
        folder.mkdir()
        output = write_parts(folder)
        everything = sorted(rows(folder / "data")), sorted(rows(folder / "errors"))
        target = 2 * max(path.stat().st_size for path in (folder / "data").iterdir())
        fuse = Fuse(moments)
        with monkeypatch.context() as patch:
            write = fuse(pyarrow.parquet.ParquetWriter.write_table)
            patch.setattr(pyarrow.parquet.ParquetWriter, "write_table", lambda *given, write=write: write(*given))
            try:
                compact(OutputFolder(Location(WatchedFiles(output.root.filesystem, fuse), output.root.path)), target)
                finished = True
            except KilledError:
                moments += 1
        # Every part is known to be committed, and every row is there, whatever stands where.
        assert output.committed() == set(PARTS)
        assert set(rows(folder / "data")) >= set(everything[0])
        compact(output, None)  # a submission that no longer asks for it goes on with it, too
        assert (sorted(rows(folder / "data")), sorted(rows(folder / "errors"))) == everything
        assert output.committed() == set(PARTS)
    assert moments > 20


def test_a_job_that_compacts(run: Run, finished: FinishedJob) -> None:
    """All rows are there, so the job has only this left to do, and no engine is started for it."""
    rows_before = finished.outcome.rows
    finished.reopen()
    settings = (*JOB_SETTINGS, "--writing.compact_mb", 1)
    done = run(finished.source, *settings)
    assert done.code == 0, done.stderr
    assert names(done.folder / "data") == [WHOLE]
    assert done.rows == rows_before
    assert [row["request_id"].rpartition(":")[2] for row in done.errors] == ["8", "9"]
    assert "7 finished, 2 failed" in done.stdout

    # Finished, it writes nothing.
    before = (done.folder / "data" / WHOLE).stat().st_mtime_ns
    assert run(finished.source, *settings).code == 0
    assert (done.folder / "data" / WHOLE).stat().st_mtime_ns == before
