"""Files on this machine and on S3, which is a server on this machine; patterns."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from pipeline.cluster.ray_cluster import free_ports
from pipeline.errors import InputError
from pipeline.io.files import (
    Location,
    address_below,
    is_copy,
    is_pattern,
    locate,
    mend,
    pattern_base,
    pattern_regex,
    read_either,
    write_twice,
)
from pipeline.io.listing import list_input
from pipeline.output.folder import OutputFolder
from tests.pipeline.conftest import TIMING_COLUMNS, Run
from tests.support.damage import Damage, cut, empty, files_below
from tests.support.waiting import wait_until

# Files on this machine and on S3, which is a server on this machine.


PROMPTS = [f"how many apples {n}" for n in range(6)]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URI of an empty bucket, `{}` standing for a path in it."""
    (port,) = free_ports(1)
    log = (tmp_path_factory.mktemp("s3") / "log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    try:

        def answers() -> bool:
            assert server.poll() is None, "the server ended"
            with socket.socket() as client:
                return not client.connect_ex(("127.0.0.1", port))

        wait_until(answers, "the server")
        uri = f"s3://key:secret@bucket/{{}}?scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"
        filesystem, _ = fs.FileSystem.from_uri(f"{uri.format('')}&allow_bucket_creation=true")
        filesystem.create_dir("bucket")
        yield uri
    finally:
        server.kill()
        server.wait()
        log.close()


def names(folder: Location) -> list[str]:
    """Objects below a folder, without the markers of folders."""
    found = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True, allow_not_found=True))
    return sorted(str(info.path[len(folder.path) + 1 :]) for info in found if info.type == fs.FileType.File)


@pytest.mark.slow
def test_a_job_from_bucket_to_bucket(run: Run, bucket: str, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    for name, some in (("a", rows[:4]), ("b", rows[4:]), ("other", ["not asked for"])):
        locate(bucket.format(f"in/{name}.jsonl")).write_text("\n".join(some))
    place = locate(bucket.format("out"))
    arguments = ("--output", bucket.format("out"), "--writing.rows_per_file", 2, "--engine.num_draft_tokens", 3)
    done = run(bucket.format("in/[ab].jsonl"), *arguments)
    assert done.code == 0, done.stderr
    parts = [f"data/00000-{n:06d}.parquet" for n in range(3)]
    staged = [f"_staged/{Path(part).name}" for part in parts]
    kept_twice = [f"{name}{suffix}" for name in ("run.json", "_staged/parts.json") for suffix in ("", ".copy")]
    assert names(place) == sorted(["README.md", *parts, *staged, *kept_twice, "status.json"])
    written = pyarrow.parquet.read_table((place / "data").path, filesystem=place.filesystem)
    assert written["prompt"].to_pylist() == PROMPTS

    # The same as on this machine's own files.
    (tmp_path / "in").mkdir()
    for name, some in (("a", rows[:4]), ("b", rows[4:])):
        (tmp_path / "in" / f"{name}.jsonl").write_text("\n".join(some))
    local = run(tmp_path / "in", "--engine.num_draft_tokens", 3)
    assert local.code == 0, local.stderr
    assert written["token_ids"].to_pylist() == [row["token_ids"] for row in local.rows]

    # What is missing is made again, and nothing else is written.
    before = {info.path: info.mtime_ns for info in (place / "data").children()}
    place.filesystem.delete_file((place / parts[1]).path)
    run_file = place / "run.json"
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "state": "running"}))
    resumed = run(bucket.format("in/[ab].jsonl"), *arguments)
    assert resumed.code == 0, resumed.stderr
    assert "2 of 6 rows to generate" in resumed.stderr
    after = {info.path: info.mtime_ns for info in (place / "data").children()}
    assert [path for path in before if before[path] == after[path]] == [(place / parts[n]).path for n in (0, 2)]
    again = pyarrow.parquet.read_table((place / "data").path, filesystem=place.filesystem)
    same = [name for name in written.column_names if name not in TIMING_COLUMNS]
    assert again.column_names == written.column_names
    assert again.select(same).equals(written.select(same))


@pytest.mark.slow
def test_a_key_with_nothing_between_two_slashes(bucket: str) -> None:
    """Only another client can write such a key: pyarrow cannot, and cannot read it."""
    port = bucket.partition("127.0.0.1:")[2].partition("&")[0]
    for key in ("empty//a.jsonl", "empty/b.jsonl"):
        with urlopen(Request(f"http://127.0.0.1:{port}/bucket/{key}", b'{"prompt": "x"}\n', method="PUT")):
            pass
    with pytest.raises(InputError, match=r"^input bucket/empty//a\.jsonl has nothing between two slashes"):
        list_input(bucket.format("empty"))
    with pytest.raises(InputError, match=r"^input s3://\*\*\*@bucket/empty//a\.jsonl\?.* cannot be listed: Empty path"):
        list_input(bucket.format("empty//a.jsonl"))
    assert [file.name for file in list_input(bucket.format("empty/*.jsonl")).files] == ["b.jsonl"]


def test_a_store_that_does_not_answer_is_waited_for_a_short_time() -> None:
    place = locate("gs://bucket/in")
    assert place.path == "bucket/in"
    for uri, seconds in (("gs://bucket/in", 10), ("gs://bucket/in?retry_limit_seconds=60", 60)):
        settings = locate(uri).filesystem.__reduce__()[1][0]
        assert settings["retry_time_limit"] == timedelta(seconds=seconds)


@pytest.mark.slow
def test_an_object_appears_as_a_whole_or_not_at_all(bucket: str) -> None:
    place = locate(bucket.format("whole/file"))

    def fail() -> None:
        with place.open_whole() as stream:
            stream.write(b"x" * 1000)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert names(locate(bucket.format("whole"))) == []
    with place.open_whole() as stream:
        stream.write(b"x" * (20 << 20))  # several parts of an upload
        assert names(locate(bucket.format("whole"))) == []
    assert names(locate(bucket.format("whole"))) == ["file"]
    assert place.info.size == 20 << 20


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [1, 20])
def test_a_killed_upload_leaves_nothing(bucket: str, megabytes: int) -> None:
    """The process ends while an object is on its way, before its upload is completed."""
    uri = bucket.format("killed/file")
    program = (
        "import os, signal, sys; from pipeline.io.files import locate; place = locate(sys.argv[1]);"
        "stream = place.filesystem.open_output_stream(place.path);"
        f"stream.write(b'x' * ({megabytes} << 20)); stream.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, uri], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert ended.returncode == -signal.SIGKILL
    assert names(locate(bucket.format("killed"))) == []


@pytest.mark.slow
def test_the_folders_of_a_job(bucket: str) -> None:
    output = OutputFolder(locate(bucket.format("folders")))
    assert output.committed() == set()
    output.create()
    (output.data / "p1.parquet").write_text("")
    assert output.committed() == {"p1"}
    assert names(output.root) == ["data/p1.parquet"]


def test_a_file_is_synced_before_it_is_shown_and_its_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, bool]] = []
    shown = tmp_path / "new" / "file"

    def fsync(opened: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{opened}"))
        steps.append(("folder" if path.is_dir() else path.read_text(), shown.exists()))

    monkeypatch.setattr("os.fsync", fsync)
    folder = locate(str(tmp_path / "new"))
    folder.make_folder()
    assert steps == [("folder", False)]  # the new folder's name
    with (folder / "file").open_whole() as stream:
        stream.write(b"bytes")
    assert steps[1:] == [("bytes", False), ("folder", True)]


def test_two_who_write_a_text_at_once_do_not_share_its_partial_file(tmp_path: Path) -> None:
    file = locate(str(tmp_path / "x.json"))
    texts = [letter * 100_000 for letter in "abcd"]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(20):
            list(pool.map(file.write_text, texts))
            assert file.read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_text_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()  # nothing can be renamed to it
    with pytest.raises(OSError, match=r"x\.json"):
        locate(str(tmp_path / "x.json")).write_text("text")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("damage", [empty, cut])
def test_a_file_that_is_kept_twice_survives_the_damage_of_one(tmp_path: Path, damage: Damage) -> None:
    file = locate(str(tmp_path / "x.json"))
    with pytest.raises(FileNotFoundError):
        read_either(file, ["a"])
    write_twice(file, {"a": "first"})
    write_twice(file, {"a": "second"})
    assert is_copy("x.json.copy", "x.json")
    assert files_below(tmp_path) == {"x.json", "x.json.copy"}
    damage(tmp_path / "x.json")
    assert read_either(file, ["a"]) == {"a": "second"}
    mend(file, ["a"])
    assert json.loads(file.read_text()) == {"a": "second"}
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(ValueError, match=r"x\.json is damaged"):
        read_either(file, ["a"])


def test_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file: Location = locate(str(tmp_path)) / "x.json"
    file.write_text("one")
    file.write_text("two")
    assert file.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# What patterns match, and where they begin.


@given(st.text("ab/.", max_size=8))
def test_patterns_without_wildcards_match_only_themselves(path: str) -> None:
    assert pattern_regex(path).fullmatch(path)
    assert not pattern_regex(path).fullmatch(path + "a")


def test_brackets_stand_for_a_character_and_may_be_written() -> None:
    assert pattern_regex("/runs [2024-01-05]/*.jsonl").fullmatch("/runs 2/a.jsonl")  # 4-0 is no range
    assert pattern_regex("/runs [[]2024-01-05]/*.jsonl").fullmatch("/runs [2024-01-05]/a.jsonl")


@pytest.mark.parametrize(
    ("uri", "base"),
    [
        ("s3://bucket/in/*.jsonl?region=eu", "s3://bucket/in?region=eu"),
        ("s3://bucket/in?region=eu", None),
        ("in/a?.jsonl", "in"),
        ("*.jsonl", "."),
        ("[ab].jsonl", "."),
        ("**/*.jsonl", "."),
        ("/*.jsonl", "/"),
    ],
)
def test_a_query_is_no_pattern(uri: str, base: Any) -> None:
    assert is_pattern(uri) is (base is not None)
    if base is not None:
        assert pattern_base(uri) == base


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("out/", "out/data/x.parquet"),
        ("/", "/data/x.parquet"),
        ("out?1", "out?1/data/x.parquet"),
        ("~/out", "/home/me/out/data/x.parquet"),
        ("s3://bucket/~/out/?region=eu", "s3://bucket/~/out/data/x.parquet?region=eu"),
    ],
)
def test_an_address_below_a_folder_can_be_opened(monkeypatch: pytest.MonkeyPatch, folder: str, below: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert address_below(folder, "data/x.parquet") == below
