"""Rows of all files become parts of one size, the same every time; a row may be several samples."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from ray.exceptions import WorkerCrashedError

from drafter import SamplingParams, SpeculativeLM
from drafter.requests import hashed_seed, sample_seed
from pipeline.errors import InputError, JobError
from pipeline.generate.row_keys import content_hash
from pipeline.generate.row_requests import row_sampling
from pipeline.generate.staging import (
    StagingPlan,
    _say_what_chats_are,
    cut,
    expand,
    rows_per_part,
    stage_files,
    staged_group,
)
from pipeline.io.apart import Apart
from pipeline.io.column_types import unify
from pipeline.io.files import locate
from pipeline.io.listing import InputListing, find_prompts, list_input
from pipeline.io.parts import PROBLEM_TYPE, StagedInput
from pipeline.io.reading import InputFile
from pipeline.openai.batch import MOST_CHOICES
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import Run, write_jsonl
from tests.support.damage import end_reader
from tests.support.staging import read_parts, staged, staged_input, write_input

# Rows of all files become parts of one size, the same every time.


PROMPTS = [f"prompt {number}" for number in range(7)]


@pytest.mark.parametrize(
    ("gigabytes", "reading", "rows"),
    [
        (0, ReadingConfig(), 128),
        (1, ReadingConfig(), 128),
        (5, ReadingConfig(), 512),
        (50, ReadingConfig(), 1024),
        (50, ReadingConfig(limit=1_000_000), 128),
        (1, ReadingConfig(samples=8), 1024),
    ],
)
def test_parts_of_a_large_input_have_more_rows(gigabytes: int, reading: ReadingConfig, rows: int) -> None:
    """Small jobs have what they always had, so that all engines get some."""
    files = tuple(InputFile(f"{n}.jsonl", f"{n}.jsonl", 10**9, "jsonl") for n in range(gigabytes))
    assert rows_per_part(InputListing(fs.LocalFileSystem(), files), reading) == rows


def test_the_limit_counts_rows_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_input(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, _, _ = staged(tmp_path / "in", tmp_path / "staged", limit=9)
    assert [one for part in ids for one in part][-2:] == ["b.txt:1", "b.txt:2"]
    assert sum(map(len, ids)) == 9


def test_rows_at_the_beginning_are_left_out_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_input(tmp_path / "in" / f"{name}.txt", [{"prompt": prompt} for prompt in PROMPTS])
    ids, rows, _ = staged(tmp_path / "in", tmp_path / "staged", skip=9, limit=6)
    # They keep the names of their places.
    assert [one for part in ids for one in part] == ["b.txt:3", "b.txt:4", "b.txt:5", "b.txt:6", "b.txt:7", "c.txt:1"]
    assert [row["prompt"] for row in rows] == [*PROMPTS[2:], PROMPTS[0]]


def test_ids_of_their_own(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "id": 7}, {"prompt": "y", "id": "b"}, {"prompt": "z"}, {"prompt": "x", "id": 8.0}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    ids, _, problems = staged(path, tmp_path / "staged", id_column="id")
    assert ids == [["7", "b", "a.jsonl:3"], ["a.jsonl:4"]]
    no_id = "the id column 'id' is 8.0, not text or an integer"
    assert problems == {"a.jsonl:3": "the id column 'id' is empty", "a.jsonl:4": no_id}


def test_a_line_that_is_no_row_leaves_the_others_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "id": 7}\n{"prompt": "\\ud83d", "id": 8}\n{"prompt": "z", "id": 9}\n')
    ids, _, problems = staged(path, tmp_path / "staged")
    assert ids == [["7", "a.jsonl:2", "9"]]
    assert problems == {"a.jsonl:2": "the line has half a character: an unpaired surrogate"}


def test_a_column_id_that_does_not_name_a_row_is_refused_and_may_be_left_aside(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": 7}, {"prompt": "y"}])
    with pytest.raises(
        InputError, match=r"^column 'id' names no row in a\.jsonl:2: set reading\.id_column to .* or to ''"
    ):
        staged(path, tmp_path / "staged")
    ids, rows, problems = staged(path, tmp_path / "staged", id_column="")
    assert (ids, rows[0]["id"], problems) == ([["a.jsonl:1", "a.jsonl:2"]], 7, {})


def test_an_id_of_two_rows_is_refused_with_both_places(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": name} for name in ("a", "b", "a", "c")])
    folder = tmp_path / "staged"
    wanted = r"1 ids stand for several rows \('a': a\.jsonl:1, a\.jsonl:3\): set reading\.id_column to .* or to ''"
    with pytest.raises(InputError, match=wanted):
        staged_input(path, folder)
    # By content there are four equal rows, each with a seed of its own; the places of the first are in another part.
    found = staged_input(path, folder, id_column="")
    assert [part.repeats for part in found.parts] == [(0, 1, 2), (3,)]
    found.save()
    assert StagedInput.load(found.folder) == found
    names = [name for table in read_parts(found) for name in table["seed_name"].to_pylist()]
    first = content_hash('{"prompt": "x"}').hex()
    assert names == [first, f"{first}+1", f"{first}+2", f"{first}+3"]


def table(*lengths: int) -> pa.Table:
    """Rows as `cut` takes them, each with so many bytes of text and four for where it begins."""
    texts = pa.array(["x" * length for length in lengths])
    return pa.table({"row": pa.StructArray.from_arrays([texts], names=["text"])})


def test_a_part_closes_by_its_rows_or_by_its_bytes() -> None:
    parts = list(cut([table(6, 6, 6), table(0, 96, 6), table(496, 6, 6, 6)], most_rows=3, most_bytes=100))
    lengths = [[len(row["text"]) for table in part for row in table["row"].to_pylist()] for part in parts]
    assert lengths == [[6, 6, 6], [0], [96], [6], [496], [6, 6, 6]]


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(1, 200),
)
def test_parts_hold_the_same_rows_however_they_come(tables: list[list[int]], rows: int, nbytes: int) -> None:
    parts = [pa.concat_tables(part) for part in cut([table(*lengths) for lengths in tables], rows, nbytes)]
    whole = table(*[length for lengths in tables for length in lengths])
    assert pa.concat_tables(parts).equals(whole)
    assert parts == [pa.concat_tables(part) for part in cut([whole], rows, nbytes)]
    assert all(part.num_rows == 1 or (part.num_rows <= rows and part.nbytes <= nbytes) for part in parts)
    # None could have taken the next one's first row.
    for part, following in pairwise(parts):
        assert part.num_rows == rows or part.nbytes + following.slice(0, 1).nbytes > nbytes


def test_workers_that_crash_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crashed(_: object) -> None:
        raise WorkerCrashedError

    monkeypatch.setattr("ray.get", crashed)
    monkeypatch.setattr("pipeline.io.listing.Apart", Apart)
    write_input(tmp_path / "a.parquet", [{"prompt": "whole"}])
    with pytest.raises(JobError, match="the input cannot be staged: The worker died"):
        staged_group(None, list_input(str(tmp_path)))
    end_reader(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"/b\.parquet cannot be read: .* ends the process that does it"):
        staged_group(None, list_input(str(tmp_path)))


@pytest.mark.slow
def test_a_file_that_ends_the_workers_that_stage_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.io.listing.Apart", Apart)
    write_input(tmp_path / "in" / "a.parquet", [{"prompt": "whole"}])
    end_reader(tmp_path / "in" / "b.parquet")
    done = run(tmp_path / "in")
    assert done.code == 2
    assert "/b.parquet cannot be read: " in done.error


# Several texts a row, each with its own name and seed.


def test_each_row_as_often_as_it_is_wanted() -> None:
    table = pa.table(
        {
            "request_id": ["a", "b", "c"],
            "seed_name": ["s", None, "t"],
            "row": [{"x": 1, "sample": "theirs"}, {"x": 2, "sample": None}, {"x": 3, "sample": "too"}],
            "problem": pa.nulls(3, PROBLEM_TYPE),
        }
    )
    pieces = list(expand(table, [2, 0, 1], piece_bytes=1))
    assert [piece.num_rows for piece in pieces] == [1, 1, 1]  # each row has more bytes than a piece
    made = pa.concat_tables(pieces)
    assert made.equals(pa.concat_tables(expand(table, [2, 0, 1], piece_bytes=1 << 20)))
    assert made["request_id"].to_pylist() == ["a#0", "a#1", "c#0"]
    assert made["seed_name"].to_pylist() == ["s#0", "s#1", "t#0"]
    assert made["row"].to_pylist() == [
        {"x": 1, "input_sample": "theirs", "sample": 0},
        {"x": 1, "input_sample": "theirs", "sample": 1},
        {"x": 3, "input_sample": "too", "sample": 0},
    ]


def test_seeds_of_samples() -> None:
    # A change of these numbers would change every sampled token of every dataset.
    assert [sample_seed(7, sample) for sample in range(3)] == [7, 1256986795558303079, 4596428739562096351]
    assert row_sampling(SamplingParams(seed=3), "r#1", {}, "sampling", 1).seed == hashed_seed(3, "r#1")
    assert row_sampling(SamplingParams(seed=3), "r#1", {"seed": 7}, "sampling", 1).seed == sample_seed(7, 1)
    assert row_sampling(SamplingParams(seed=3), "r#0", {"seed": 7}, "sampling", 0).seed == 7


def test_samples_cross_the_borders_of_parts(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "id": "x"}, "{broken", {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "z"}]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    ids, rows, problems = staged(path, tmp_path / "staged", samples=3, id_column="id", limit=3)
    assert ids == [["x#0", "x#1", "x#2"], ["a.jsonl:2#0", "y#0", "y#1"], ["y#2"]]  # the limit counts rows of the input
    assert [row["sample"] for row in rows] == [0, 1, 2, 0, 0, 1, 2]
    assert list(problems) == ["a.jsonl:2#0"]


def test_a_line_of_a_batch_does_not_become_any_number_of_rows(tmp_path: Path) -> None:
    bodies = {"most": (["a"] * 128, 128), "n": (["a"] * 129, 128), "prompts": (["a"] * 20_000, 1)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": prompt, "n": n, "max_tokens": 1},
        }
        for name, (prompt, n) in bodies.items()
    ]
    ids, _, problems = staged(write_jsonl(tmp_path / "a.jsonl", lines), tmp_path / "staged", rows_per_part=20_000)
    assert len(list(chain.from_iterable(ids))) == MOST_CHOICES + 2
    assert problems == {
        f"{name}#0": f"At most 16384 choices a line are allowed, not {count}: make several lines of it."
        for name, count in (("n", 129 * 128), ("prompts", 20_000))
    }


@pytest.mark.slow
def test_a_job_of_several_samples(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "how many"}, {"prompt": "does she", "seed": 5}])
    done = run(source, "--reading.samples", 2, "--sampling.temperature", 1, "--sampling.logprobs", 1)
    assert done.code == 0, done.stderr
    assert [(row["request_id"], row["sample"]) for row in done.rows] == [
        (f"in.jsonl:{line}#{sample}", sample) for line in (1, 2) for sample in (0, 1)
    ]
    first = content_hash('{"prompt": "how many"}').hex()
    assert [row["seed"] for row in done.rows] == [
        hashed_seed(0, f"{first}#0"),
        hashed_seed(0, f"{first}#1"),
        5,
        4983930932166335007,
    ]
    for row in done.rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": row["seed"], "logprobs": 1}
        alone = plain.generate([chat], **settings)[0]
        assert row["token_ids"] == alone.token_ids
        assert alone.logprobs is not None
        assert [one["token_id"] for one in row["logprobs"]] == row["token_ids"]
        assert [one["logprob"] for one in row["logprobs"]] == pytest.approx(
            [one.logprob for one in alone.logprobs], abs=1e-4
        )
        assert [len(one["top"]) for one in row["logprobs"]] == [1] * len(row["token_ids"])
        assert sum(row["per_step_accepted"]) == row["num_accepted_draft_tokens"]
        assert len(row["per_step_accepted"]) == row["num_decode_steps"]

    # Another number of samples is another meaning.
    assert "reading.samples was 2, is now 1" in run(source, "--sampling.temperature", 1, "--sampling.logprobs", 1).error


def test_chats_that_no_type_holds_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    user = {"role": "user", "content": "x"}
    chats: list[Any] = [[user], [user | {"content": [{"type": "text", "text": "x"}]}]]
    inputs = {"one": (chats[:1], False), "texts": ([json.dumps(chats[0])], False), "mixed": (chats, True)}
    for name, (rows, told) in inputs.items():
        listing = list_input(str(write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": chat} for chat in rows])))
        plan = StagingPlan(locate(str(tmp_path / name)), ReadingConfig(), find_prompts(listing, ReadingConfig()), 9)
        plan.folder.make_folder()
        parts, seen = stage_files(listing, "00000", plan)
        _say_what_chats_are(StagedInput(plan.folder, tuple(parts), unify(seen, json_objects=True)), "messages")
        assert ("column 'messages' is kept as JSON text" in capfd.readouterr().err) == told
