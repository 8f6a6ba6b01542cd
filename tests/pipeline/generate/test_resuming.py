"""Rows that are done stay done when the input around them changes."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from drafter.images.opening import ImageLimits
from drafter.requests import Generation, Request, SamplingParams, hashed_seed
from drafter.statistics import DecodeCounts
from pipeline.engines.ledger import SavedRow, read_unfinished, write_unfinished
from pipeline.errors import InputError, RowProblem
from pipeline.generate.checks import Job, input_source, job_meaning
from pipeline.generate.config import parse_config
from pipeline.generate.resuming import compare, delete_strays, dry_run, grow, is_finished, reopen
from pipeline.generate.row_images import ImageReading
from pipeline.generate.row_keys import AskedRows, equal_before, match, numbered_seeds, text_keys
from pipeline.generate.staging import StagingPlan, stage_files, told_apart
from pipeline.io.column_types import unify
from pipeline.io.files import Location, locate
from pipeline.io.listing import find_prompts, list_input
from pipeline.io.parts import StagedInput, with_problems, with_repeats, with_row_type
from pipeline.output.columns import RunTraits, column_values, columns_type, wanted_columns
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part, is_whole
from tests.pipeline.conftest import Driver, Run, job_arguments, write_jsonl
from tests.support.damage import Damage, cut, empty
from tests.support.faults import EndedError, FailingFiles
from tests.support.waiting import wait_until

TRAITS = RunTraits(SamplingParams(), rows_have_settings=False, drafter="first")


def asked(*rows: tuple[str, str], seeds: npt.NDArray[np.int64] | None = None) -> AskedRows:
    """Rows with ids, and what they ask for; with `seeds`, what their seeds follow from is that and this number."""
    names, requests = (text_keys(row[place] for row in rows) for place in (0, 1))
    return AskedRows(names, names if seeds is None else numbered_seeds(requests, seeds), requests)


def are(done: str, before: AskedRows) -> npt.NDArray[np.bool_]:
    """Which rows have one of the names in `done`."""
    names = {tuple(key) for key in text_keys(done).tolist()}
    return np.array([tuple(key) in names for key in before.names.tolist()], bool)


def test_a_row_takes_the_result_of_its_seed_and_otherwise_of_what_it_asks_for() -> None:
    before = asked(("1", "x"), ("2", "y"), ("3", "x"), ("4", "z"))
    now = asked(("1", "y"), ("2", "x"), ("3", "x"), ("5", "x"), ("6", "n"))
    found = match(before, now, drawn=False)
    # The third keeps its own; the second and the fourth share what is left of `x`, and the first finds `y`.
    assert found.tolist() == [1, 0, 2, -1, -1]
    assert match(before, now, drawn=True).tolist() == [-1, -1, 2, -1, -1]
    assert str(compare(before, now, found, are("1234", before))) == "5 rows: 3 kept, 2 new, 1 removed, whose results go"
    changed = asked(("4", "other"))
    counts = compare(before, changed, match(before, changed, drawn=False), are("1", before))
    assert (counts.kept, counts.changed, counts.removed) == (0, 1, 3)
    some = compare(before, before, match(before, before, drawn=True), are("13", before))
    assert str(some) == "4 rows: 2 kept, 2 still to generate"


ROWS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc")), unique_by=lambda row: row[0])


@given(ROWS, ROWS)
def test_no_result_is_lost_or_used_twice(before: list[tuple[int, str]], now: list[tuple[int, str]]) -> None:
    old, new = (asked(*((str(name), what) for name, what in rows)) for rows in (before, now))
    found = match(old, new, drawn=False)
    used = [index for index in found.tolist() if index >= 0]
    assert len(used) == len(set(used))
    for (name, what), index in zip(now, found.tolist(), strict=True):
        assert index < 0 or before[index][1] == what
        # Of several old rows the one of its own name comes first.
        assert (name, what) not in before or before[index] == (name, what)
    # As many as there can be: for each key the smaller of both numbers.
    both = Counter(what for _, what in before) & Counter(what for _, what in now)
    assert len(used) == both.total()
    counts = compare(old, new, found, np.ones(len(old), bool))
    assert counts.kept == len(used)
    assert counts.kept + counts.changed + counts.removed == len(old)
    left = {name for index, (name, _) in enumerate(before) if index not in used}
    assert counts.changed == sum(index < 0 and name in left for (name, _), index in zip(now, found, strict=True))


@given(st.lists(st.text("ab", max_size=6), max_size=5))
def test_seeds_of_rows_without_ids_are_those_of_a_new_output_whatever_came_before(inputs: list[str]) -> None:
    before, old = asked(), list[str]()
    seeds: list[str] = []
    for text in inputs:
        numbers = equal_before(text_keys(text))
        now = asked(*((str(n), what) for n, what in enumerate(text)), seeds=numbers)
        new = [f"{what}+{number}" for what, number in zip(text, numbers, strict=True)]
        assert new == [f"{what}+{text[:n].count(what)}" for n, what in enumerate(text)]
        found = match(before, now, drawn=True).tolist()
        seeds = [one if at < 0 else seeds[at] for one, at in zip(new, found, strict=True)]
        assert all(at >= 0 for one, at in zip(new, found, strict=True) if one in old)
        before, old = now, new
        assert seeds == new
        assert len(set(seeds)) == len(seeds)


class MadeUpJob:
    """A job in this process, whose results are made up from what each row asks for."""

    def __init__(self, folder: Path, rows: list[Any], *settings: str) -> None:
        self.source, self.folder, self._settings = folder / "in.jsonl", folder / "out", settings
        self.staged = self.restage(rows)
        self.staged.save()

    def restage(self, rows: list[Any], revision: int = 0) -> StagedInput:
        """Write the input and stage it."""
        write_jsonl(self.source, rows)
        given = ["--input", str(self.source), "--output", str(self.folder), *self._settings]
        config, listing = parse_config(given), list_input(str(self.source))
        prompts, output = find_prompts(listing, config.reading), OutputFolder(locate(str(self.folder)))
        output.create()
        output.staged.make_folder()
        meaning = job_meaning(config, prompts, "base", {})
        self.job = Job(config, listing, prompts, output, meaning, {}, input_source(config, listing))
        plan = StagingPlan(output.staged, config.reading, prompts, 3, self.job.source, revision)
        parts, seen = stage_files(listing, f"{revision:03d}-00000" if revision else "00000", plan)
        row_type = unify(seen, json_objects=True)
        found = StagedInput(plan.folder, tuple(parts), row_type, 3, source=plan.source, revision=revision)
        return told_apart(found, plan)

    def generate(self, *parts: int, drafter: str = "first") -> None:
        """Commit some parts."""
        for number in parts:
            part = self.staged.parts[number]
            rows = with_repeats(pyarrow.parquet.read_table(self.staged.file(part).path), part)
            rows = with_row_type(rows, self.staged.row_type)
            columns = (rows[name].to_pylist() for name in ("asked", "seed_name", "problem"))
            values = [
                made_up(one, drafter, seed_name) if problem is None else None
                for one, seed_name, problem in zip(*columns, strict=True)
            ]
            kind = columns_type(wanted_columns(TRAITS))
            commit_part(self.job.output, part.name, rows.append_column("generated", pa.array(values, kind)))

    def grow(self, rows: list[Any]) -> None:
        """Change the input, and bring the results to it."""
        now = self.restage(rows, self.staged.revision + 1)
        grow(self.job, self.staged, now, wanted_columns(TRAITS))
        loaded = StagedInput.load(self.job.output.staged)
        assert loaded is not None
        self.staged = loaded

    def finish(self) -> None:
        """Generate what is missing, with what is left of unfinished parts."""
        left = {(row.part, row.request_id): row for row in read_unfinished(self.job.output)}
        for part in self.staged.without(self.job.output.committed()):
            rows = with_repeats(pyarrow.parquet.read_table(self.staged.file(part).path), part)
            rows = with_row_type(rows, self.staged.row_type)
            values = []
            for name, seed_name, one, problem in zip(
                *(rows[c].to_pylist() for c in ("request_id", "seed_name", "asked", "problem")), strict=True
            ):
                kept = left.get((part.name, name))
                new = None if problem else made_up(one, "second", seed_name)
                values.append(new if kept is None else kept.generated)
            kind = columns_type(wanted_columns(TRAITS))
            commit_part(self.job.output, part.name, rows.append_column("generated", pa.array(values, kind)))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Finished rows in the order of the files."""
        files = sorted((self.folder / "data").iterdir())
        return [row for file in files for row in pyarrow.parquet.ParquetFile(file).read().to_pylist()]


def made_up(asked_for: str, drafter: str, seed_name: str = "") -> dict[str, Any]:
    counts = DecodeCounts()
    counts.record_step(emitted=1, accepted=0, drafted=0)
    generation = Generation("", [7], f"on {json.loads(asked_for)['prompt']}", "stop", 1, counts)
    traits = replace(TRAITS, drafter=drafter)
    return column_values(
        generation, Request([1], SamplingParams(seed=hashed_seed(0, seed_name))), traits, wanted_columns(traits)
    )


def of(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, Any]]:
    return [(row["request_id"], row["text"], row["drafter"], row.get("n")) for row in rows]


def prompts(*names: str, **more: Any) -> list[Any]:
    return [{"prompt": name, "n": number, **more} for number, name in enumerate(names)]


def test_rows_are_kept_with_the_columns_that_they_have_now(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, [*prompts("a", "b", "c", "d", "e"), {"prompt": 5, "n": 5}, *prompts("f")])
    job.generate(0, 1, 2)
    assert len(job.rows) == 6
    # One is gone from the beginning, one is changed, two are new, and `n` is a text by now.
    job.grow([*prompts("b", "c", "d", "x"), {"prompt": 5}, *prompts("f", "y"), {"prompt": "z", "n": "two"}])
    parts = [part.name for part in job.staged.parts]
    assert parts == ["001-00000-000000", "001-00000-000001", "001-00000-000002"]
    # The first part has all of its rows; of the others some are left as by a submission that was stopped.
    assert job.job.output.committed() == {parts[0]}
    assert {(row.part, row.request_id) for row in read_unfinished(job.job.output) if row.part in parts} == {
        (parts[1], "in.jsonl:6"),
    }
    job.finish()
    assert of(job.rows) == [
        ("in.jsonl:1", "on b", "first", "0"),
        ("in.jsonl:2", "on c", "first", "1"),
        ("in.jsonl:3", "on d", "first", "2"),
        ("in.jsonl:4", "on x", "second", "3"),
        ("in.jsonl:6", "on f", "first", "0"),
        ("in.jsonl:7", "on y", "second", "1"),
        ("in.jsonl:8", "on z", "second", "two"),
    ]
    assert is_whole(job.job.output, job.staged.parts)
    assert [path.name for path in (tmp_path / "out" / "errors").iterdir()] == [f"{parts[1]}.parquet"]


def test_equal_rows_have_the_seeds_of_a_new_output_when_a_row_came_and_went(tmp_path: Path) -> None:
    settings = ("--sampling.temperature", "0.7")
    (tmp_path / "grown").mkdir()
    (tmp_path / "new").mkdir()
    job = MadeUpJob(tmp_path / "grown", prompts(*"aaa"), *settings)
    job.finish()
    for rows in ("xaaa", "aaaa"):
        job.grow(prompts(*rows))
        job.finish()
    new = MadeUpJob(tmp_path / "new", prompts(*"aaaa"), *settings)
    new.finish()
    seeds = [row["seed"] for row in job.rows]
    assert seeds == [row["seed"] for row in new.rows]
    assert len(set(seeds)) == 4


def test_settings_below_the_first_rows_draw_tokens_too(tmp_path: Path) -> None:
    rows = [{"id": str(number), "prompt": "a"} for number in range(101)]
    last = {"prompt": "b", "sampling": {"temperature": 1}}
    job = MadeUpJob(tmp_path, [*rows, {"id": "x", **last}])
    job.finish()
    now = [*rows, {"id": "y", **last}]
    job.restage(now, 1)
    assert str(dry_run(job.job)) == "102 rows: 101 kept, 1 new, 1 removed, whose results go"
    job.grow(now)
    job.finish()
    assert job.rows[-1]["seed"] == hashed_seed(0, "y")


def test_results_and_rows_of_a_stopped_submission_are_found_too(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, prompts(*"abcdefgh"))
    job.generate(0, 1)
    part = job.staged.parts[2].name
    left = SavedRow(part, "in.jsonl:7", made_up('{"prompt": "g"}', "first"), None, 0)
    write_unfinished(job.job.output, [left])
    job.grow(prompts(*"gfedcbai"))
    job.finish()
    assert [(text, drafter) for _, text, drafter, _ in of(job.rows)] == [
        *[(f"on {name}", "first") for name in "gfedcba"],
        ("on i", "second"),
    ]


UNAVAILABLE = RowProblem("ImageUnavailable", "there is no such file")


def with_a_lost_image(folder: Path) -> MadeUpJob:
    """A finished job of two parts: in the first, a row has an image that was not there, and another took too long."""
    folder.mkdir()
    job = MadeUpJob(folder, prompts(*"abcdef"))
    job.job = replace(job.job, images=ImageReading(ImageLimits()))
    part, kind = job.staged.parts[0], columns_type(wanted_columns(TRAITS))
    rows = with_row_type(pyarrow.parquet.read_table(job.staged.file(part).path), job.staged.row_type)
    late = RowProblem("TimedOut", "late", attempts=1)
    rows = with_problems(rows, [None, vars(UNAVAILABLE), vars(late)])
    generated = pa.array([made_up('{"prompt": "a"}', "first"), None, None], kind)
    commit_part(job.job.output, part.name, rows.append_column("generated", generated))
    job.generate(1)
    job.job.save_run("finished", rows=6, batch_bytes={})
    return job


def test_a_row_whose_image_was_not_there_is_generated_again(tmp_path: Path) -> None:
    """The driver ends at each change of the file system; the next submission does the same."""
    for at in range(1, 50):
        job = with_a_lost_image(tmp_path / str(at))
        assert not is_finished(job.job)
        assert str(dry_run(replace(job.job, images=None))) == "6 rows: 5 kept, 1 still to generate"
        files = FailingFiles(EndedError(), at, for_good=True)
        with suppress(EndedError):
            reopen(replace(job.job, output=OutputFolder(Location(fs.PyFileSystem(files), str(job.folder)))))
        reopen(job.job)
        assert [part.name for part in job.staged.without(job.job.output.committed())] == ["00000-000000"]
        assert not job.job.output.errors.parquets()
        left = {row.request_id: row for row in read_unfinished(job.job.output)}
        assert len(left) == len(read_unfinished(job.job.output)) == 2
        assert left["in.jsonl:1"].generated is not None
        assert left["in.jsonl:3"].problem == vars(RowProblem("TimedOut", "late", attempts=1))
        if not files.has_failed:
            break
    assert at > 3
    write_unfinished(job.job.output, [left["in.jsonl:1"]])  # what makes up results knows no errors
    job.finish()
    assert [drafter for _, _, drafter, _ in of(job.rows)] == ["first", "second", "second", *["first"] * 3]
    assert is_finished(job.job)


def test_the_error_of_an_image_is_not_brought_to_a_changed_input(tmp_path: Path) -> None:
    job = with_a_lost_image(tmp_path / "job")
    job.grow(prompts(*"abcdefg"))
    left = {row.request_id: row.problem for row in read_unfinished(job.job.output) if row.part.startswith("001")}
    assert left.keys() == {"in.jsonl:1", "in.jsonl:3"}


def test_an_input_without_any_of_the_rows_is_refused(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, prompts(*"abc"))
    job.generate(0)
    before = job.rows
    with pytest.raises(InputError, match=r"another input: it has no result for any row of .*in\.jsonl: choose"):
        job.grow(prompts(*"xyz"))
    delete_strays(job.job.output, job.staged)
    assert job.rows == before


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, prompts(*"abcdefg"))
    job.generate(0, 1)
    job.restage(prompts(*"abxdefgh"), 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert str(dry_run(job.job)) == ("8 rows: 5 kept, 1 still to generate, 1 changed, 1 new")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", [empty, cut])
@pytest.mark.parametrize("folder", ["data", "errors"])
def test_a_dry_run_counts_rows_of_torn_parts_as_still_to_generate(tmp_path: Path, damage: Damage, folder: str) -> None:
    job = MadeUpJob(tmp_path, [*prompts("a", "b"), {"prompt": 5}, *prompts(*"defg")])
    job.generate(0, 1)
    (tmp_path / "out" / "data" / "notes.txt").write_text("x")
    damage(tmp_path / "out" / folder / f"{job.staged.parts[0].name}.parquet")
    assert str(dry_run(job.job)).startswith("7 rows: 3 kept, 4 still to generate; 1 of them will be errors")


def test_a_dry_run_refuses_what_the_job_does(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, prompts(*"abc"))
    reading = replace(job.job.config.reading, skip=3)
    with pytest.raises(InputError, match="the input has no rows"):
        dry_run(replace(job.job, config=replace(job.job.config, reading=reading)))


def test_a_dry_run_names_rows_that_cannot_be_read(tmp_path: Path) -> None:
    job = MadeUpJob(tmp_path, prompts(*"abcdef"))
    lines = job.source.read_text().splitlines()
    job.source.write_text("\n".join(["{x", *lines[:2], "[1]", *lines[2:], "x", "y"]) + "\n")
    (tmp_path / "new").mkdir()
    told = str(dry_run(replace(job.job, output=OutputFolder(locate(str(tmp_path / "new"))))))
    assert told.startswith("10 rows: 10 new; 4 of them will be errors: in.jsonl:1: ")
    assert "; in.jsonl:4: " in told
    assert told.endswith("; and 1 more")


def test_a_dry_run_counts_chats_that_the_model_cannot_take(tmp_path: Path) -> None:
    short, long = ([{"role": "user", "content": "word " * times}] for times in (1, 3000))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{"messages": short}, {"messages": short, "tools": tools}, {"messages": long}, {"messages": 5}]
    told = str(dry_run(MadeUpJob(tmp_path, rows).job))
    assert "; 3 of them will be errors: in.jsonl:2: " in told
    assert "chat template" in told
    assert "in.jsonl:3: the prompt has 6004 tokens" in told
    assert "in.jsonl:4: " in told


def test_whatever_moment_a_driver_ends_at_the_rows_are_the_same(tmp_path: Path) -> None:
    """The input changes, and the driver ends at each change of the file system; the next one begins again."""
    rows, later = prompts(*"abcdefgh"), prompts(*"bxdefghi")
    wanted: list[Any] | None = None
    for at in range(1, 200):
        folder = tmp_path / str(at)
        folder.mkdir()
        job = MadeUpJob(folder, rows)
        job.generate(0, 1)
        now = job.restage(later, 1)
        whole = job.job
        files = FailingFiles(EndedError(), at, for_good=True)
        failing = OutputFolder(Location(fs.PyFileSystem(files), str(job.folder)))
        there = replace(now, folder=failing.staged)
        staged = replace(job.staged, folder=failing.staged)
        with suppress(EndedError):
            grow(replace(whole, output=failing), staged, there, wanted_columns(TRAITS))
        # The next submission.
        loaded = StagedInput.load(whole.output.staged)
        assert loaded is not None
        job.staged = loaded
        delete_strays(whole.output, loaded)
        if loaded.source != whole.source:
            job.grow(later)
        job.finish()
        wanted = wanted or of(job.rows)
        assert of(job.rows) == wanted
        assert is_whole(whole.output, job.staged.parts)
        if not files.has_failed:
            break
    assert at > 10
    assert wanted is not None
    assert [drafter for _, _, drafter, _ in wanted].count("first") == 4


def changed(rows: list[Any], *, remove: int, change: int, add: int) -> list[Any]:
    """Remove rows from the beginning, change those behind them, and add some."""
    kept = [dict(row) for row in rows[remove:]]
    for row in kept[:change]:
        row["prompt"] += " now"
    return [*kept, *({"id": f"new {n}", "prompt": f"how many more {n}"} for n in range(add))]


def by_id(rows: list[dict[str, Any]]) -> dict[str, tuple[str, list[int]]]:
    return {row["request_id"]: (row["prompt"], row["token_ids"]) for row in rows}


def test_a_job_whose_input_has_changed(run: Run, tmp_path: Path) -> None:
    rows = [{"id": f"row {n}", "prompt": f"how many {n}"} for n in range(7)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = ("--writing.rows_per_file", 2, "--sampling.temperature", 0.5, "--reading.id_column", "id")
    first = run(source, *settings)
    assert first.code == 0, first.stderr
    write_jsonl(source, changed(rows, remove=1, change=1, add=2))
    grown = run(source, *settings, drafter="none")
    assert grown.code == 0, grown.stderr
    assert "the input has changed: 8 rows: 5 kept, 1 changed, 2 new, 1 removed, whose results go" in grown.stderr
    drafters = {row["request_id"]: row["drafter"] for row in grown.rows}
    assert [name for name, drafter in drafters.items() if drafter == "none"] == ["row 1", "new 0", "new 1"]
    # With ids of their own, all rows are those of a job that never saw the other input.
    fresh = run(source, *settings, output=tmp_path / "fresh")
    assert [(row["request_id"], row["token_ids"], row["seed"]) for row in grown.rows] == [
        (row["request_id"], row["token_ids"], row["seed"]) for row in fresh.rows
    ]
    assert run(source, *settings).stdout.startswith(
        "nothing is left to do: of 8 rows 8 are finished and 0 failed; they are in"
    )


@pytest.mark.slow
def test_a_job_whose_input_has_changed_and_whose_driver_is_killed(
    run: Run, driver: Driver, model: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"row {n}", "prompt": f"how many {n}"} for n in range(100)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = ("--writing.rows_per_file", 5, "--reading.id_column", "id")
    first = run(source, *settings)
    assert first.code == 0, first.stderr
    earlier = first.rows  # read now: the output is about to change
    write_jsonl(source, changed(rows, remove=5, change=10, add=25))
    command = job_arguments(source, first.folder, model, *settings)
    with driver("jobs.generate", *command, stderr=subprocess.DEVNULL) as job:
        new = first.folder / "data"
        wait_until(lambda: job.poll() is not None or len(list(new.glob("001-*"))) > 20, "most parts of 24")
    resumed = run(source, *settings, drafter="none")
    assert resumed.code == 0, resumed.stderr
    assert len(resumed.rows) == 120 == len(by_id(resumed.rows))
    fresh = run(source, *settings, output=tmp_path / "fresh")
    assert by_id(resumed.rows) == by_id(fresh.rows)
    kept = {name for name, found in by_id(earlier).items() if by_id(fresh.rows).get(name) == found}
    assert len(kept) == 85
    times = {row["request_id"]: row["finished_at"] for row in earlier}
    assert all(row["finished_at"] == times[row["request_id"]] for row in resumed.rows if row["request_id"] in kept)
