"""A process that may crash, hang or need too much memory, and what it tells."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.errors import InputError
from pipeline.io.apart import apart
from pipeline.io.files import locate
from pipeline.io.listing import find_prompts, list_input, read_apart
from pipeline.settings import ReadingConfig
from tests.support.damage import end_reader


def test_what_a_function_returns_and_raises() -> None:
    assert apart(locate, "/x/y", what="input a") == locate("/x/y")
    with pytest.raises(InputError, match=r"^nowhere://x cannot be opened"):
        apart(locate, "nowhere://x", what="input a")


def test_a_crash_and_limits_of_time_and_memory() -> None:
    with pytest.raises(InputError, match=r"^input a cannot be read: a process that tried ended by SIGSEGV"):
        apart(signal.raise_signal, signal.SIGSEGV, what="input a")
    with pytest.raises(InputError, match=r"^input a cannot be read within 0 seconds"):
        apart(time.sleep, 600, what="input a", seconds=0.1)
    with pytest.raises(InputError, match="MemoryError"):
        apart(bytearray, 8 << 30, what="input a", gib=4)


def test_a_file_that_ends_its_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.listing.apart", apart)
    pa.parquet.write_table(pa.table({"prompt": ["good"]}), tmp_path / "a.parquet")
    end_reader(tmp_path / "b.parquet")
    # The first rows, which the driver needs, are in a file that is whole.
    assert find_prompts(list_input(str(tmp_path)), ReadingConfig()).column == "prompt"
    ended = r"/b\.parquet cannot be read: a process that tried ended by SIGABRT"
    with pytest.raises(InputError, match=ended):
        find_prompts(list_input(f"{tmp_path}/b*"), ReadingConfig())
    with pytest.raises(InputError, match=ended):
        read_apart(list_input(str(tmp_path)))
