"""A process that may crash, hang or need too much memory, and what it tells."""

from __future__ import annotations

import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import InputError
from pipeline.io.apart import Apart
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input, read_apart
from pipeline.settings import ReadingConfig
from tests.support.damage import end_reader


def test_what_a_function_returns_and_raises() -> None:
    there = Apart(locate)
    assert there("/x/y", what="input a") == locate("/x/y")
    with pytest.raises(InputError, match=r"^nowhere://x cannot be opened"):
        there("nowhere://x", what="input a")


def test_a_crash_and_limits_of_time_and_memory() -> None:
    with pytest.raises(InputError, match=r"^input a cannot be read: .* ends the process that does it"):
        Apart(signal.raise_signal)(signal.SIGSEGV, what="input a")
    with pytest.raises(InputError, match=r"^input a cannot be read: it takes more than 1 seconds"):
        Apart(pow, 1)(3, 10**9, what="input a")
    with pytest.raises(InputError, match=r"^input a cannot be read: it takes more than 4096 MiB of memory"):
        Apart(bytearray, 10, 4 << 30)(8 << 30, what="input a")


def test_a_file_that_ends_its_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.listing.Apart", Apart)
    pa.parquet.write_table(pa.table({"prompt": ["good"]}), tmp_path / "a.parquet")
    end_reader(tmp_path / "b.parquet")
    # The first rows, which the driver needs, are in a file that is whole.
    assert find_prompts(list_input(str(tmp_path)), ReadingConfig()).column == "prompt"
    ended = r"/b\.parquet cannot be read: .* ends the process that does it"
    with pytest.raises(InputError, match=ended):
        find_prompts(list_input(f"{tmp_path}/b*"), ReadingConfig())
    with pytest.raises(InputError, match=ended):
        read_apart(list_input(str(tmp_path)))
