"""Processes end at every place, and every row is in the output once, with the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyarrow import fs

from drafter import SpeculativeLM
from drafter.embedded import EMBEDDED_BASE
from pipeline.io.files import locate
from tests.pipeline.conftest import Driver, Outcome, Run, read_rows, write_jsonl
from tests.support.faults import DeadlyFiles, FragileEngine, kill_me
from tests.support.waiting import PATIENCE, wait_until

PROMPTS = [f"how many {'apples and pens ' * (n % 3)}does she have {n}" for n in range(40)]


def assert_whole(done: Outcome, plain: SpeculativeLM, prompts: list[str], errors: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Each row is there once, with the tokens that the engine gives it, and nothing else is there."""
    assert done.code == 0, done.stderr
    names = {f"in.jsonl:{n}": prompt for n, prompt in enumerate(prompts, start=1)}
    assert Counter(row["request_id"] for row in done.rows) == Counter(names.keys() - errors)
    assert Counter(row["request_id"] for row in done.errors) == Counter(errors)
    chats = [[{"role": "user", "content": names[row["request_id"]]}] for row in done.rows]
    alone = plain.generate(chats, max_new_tokens=12)
    assert [row["token_ids"] for row in done.rows] == [generation.token_ids for generation in alone]
    assert_no_orphans(done.folder)


def assert_no_orphans(folder: Path) -> None:
    kept = {"README.md", "data", "errors", "run.json", "run.json.copy", "status.json", "_staged"}
    assert {path.name for path in folder.iterdir()} == kept
    data = {path.name for path in (folder / "data").iterdir()}
    assert data == {path.name for path in (folder / "_staged").iterdir()} - {"parts.json", "parts.json.copy"}
    assert {path.name for path in (folder / "errors").iterdir()} <= data


@pytest.mark.slow
def test_a_row_that_kills_its_engine_is_set_aside_and_no_other(
    run: Run, plain: SpeculativeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*PROMPTS[:10], "zzz", *PROMPTS[10:20], ""]
    (deadly,) = set(plain.encode("z")) - set(plain.encode(" ".join(PROMPTS)))
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", partial(FragileEngine, notes=tmp_path, deadly=deadly))
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    done = run(source, "--writing.rows_per_file", 8)
    assert_whole(done, plain, prompts, {"in.jsonl:11", "in.jsonl:22"})
    by_kind = {row["error_type"]: row for row in done.errors}
    assert by_kind["EngineDied"]["request_id"] == "in.jsonl:11"
    assert by_kind["EngineDied"]["attempts"] == 4
    assert by_kind["BadPrompt"]["attempts"] == 0
    # Four processes died, and after the first two the row was alone.
    assert len(list(tmp_path.glob("*.pid"))) == 5
    entered = Counter((tmp_path / "entered").read_text().split())
    assert entered["in.jsonl:11"] == 4
    again = sum(entered.values()) - len(entered)
    assert again <= 2 + 2 * 8


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL], pytest.param([signal.SIGTERM, signal.SIGKILL], marks=pytest.mark.slow)],
    ids=lambda signals: " ".join(one.name for one in signals),
)
def test_killed_engines_lose_nothing(
    run: Run,
    plain: SpeculativeLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[signal.Signals],
) -> None:
    slow = partial(FragileEngine, notes=tmp_path, step_seconds=0.05)
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", slow)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    killer = threading.Thread(target=kill_engines, args=[tmp_path, *signals])
    killer.start()
    done = run(source, "--writing.rows_per_file", 8)
    killer.join()
    assert_whole(done, plain, PROMPTS)
    assert len(list(tmp_path.glob("*.pid"))) == 1 + len(signals)
    assert len(entered(tmp_path)) - len(PROMPTS) <= len(signals) * 8  # so many rows fit into an engine


@pytest.mark.slow
def test_killed_ranks_lose_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = partial(FragileEngine, notes=tmp_path, step_seconds=0.05)
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", slow)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    killer = threading.Thread(target=kill_engines, args=[tmp_path, signal.SIGKILL], kwargs={"whom": rank_beside})
    killer.start()
    done = run(source, "--writing.rows_per_file", 8, "--engine.tensor_parallel_size", 2, base=EMBEDDED_BASE)
    killer.join()
    with SpeculativeLM.from_pretrained(EMBEDDED_BASE, "none", max_num_seqs=4) as alone:
        assert_whole(done, alone, PROMPTS)
    engines = [int(note.stem) for note in tmp_path.glob("*.pid")]
    assert len(engines) == 2
    assert len(entered(tmp_path)) - len(PROMPTS) <= 8


def rank_beside(engine: int) -> int:
    """The other process of an engine whose model is in two."""
    below = [one for file in Path(f"/proc/{engine}/task").glob("*/children") for one in file.read_text().split()]
    (rank,) = [one for one in below if b"drafter.ranks" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return int(rank)


def kill_engines(notes: Path, *signals: int, whom: Callable[[int], int] = int) -> None:
    """End one engine's process after the other when rows have finished in it, or that which `whom` says."""

    def has_started(turn: int) -> bool:
        return len(list(notes.glob("*.pid"))) >= turn

    def has_entered(rows: int) -> bool:
        return len(entered(notes)) >= rows

    for turn, number in enumerate(signals, start=1):
        enough = len(entered(notes)) + 10
        wait_until(partial(has_started, turn), f"engine {turn}")
        wait_until(partial(has_entered, enough), f"rows in engine {turn}")
        newest = max(notes.glob("*.pid"), key=lambda path: path.stat().st_mtime_ns)
        os.kill(whom(int(newest.stem)), number)


def entered(notes: Path) -> list[str]:
    """Rows that entered an engine, in order."""
    file = notes / "entered"
    return file.read_text().split() if file.exists() else []


@pytest.mark.slow
def test_writers_killed_at_every_step_of_a_commit(
    run: Run, plain: SpeculativeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = ("while writing", "before data", "after data")
    (tmp_path / "points").mkdir()
    files = fs.PyFileSystem(DeadlyFiles(str(tmp_path / "points"), points, kill_me))
    monkeypatch.setattr("pipeline.generate.checks.locate", lambda uri: replace(locate(uri), filesystem=files))
    prompts = [prompt if n % 5 else "" for n, prompt in enumerate(PROMPTS[:20])]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    done = run(source, "--writing.rows_per_file", 10)
    assert_whole(done, plain, prompts, {"in.jsonl:1", "in.jsonl:6", "in.jsonl:11", "in.jsonl:16"})
    assert {path.name.replace("-", " ") for path in (tmp_path / "points").iterdir()} == set(points)


@pytest.mark.slow
def test_drivers_killed_and_stopped(
    run: Run, driver: Driver, plain: SpeculativeLM, model: Path, tmp_path: Path
) -> None:
    prompts = PROMPTS * 6
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts]), tmp_path / "out"
    # Few slots, so that there is much left to do when the driver is ended.
    settings = ["--writing.rows_per_file", "25", "--sampling.max_new_tokens", "12", "--engine.max_num_seqs", "2"]
    settings += ["--engine.num_draft_tokens", "3"]  # so that the engine need not measure the machine at its start

    def stop(number: int) -> tuple[int, str, int]:
        """Submit the job, and end its driver after two more files are committed."""
        before = committed(out)
        command = ["--input", source, "--output", out, "--model", model]
        command += ["--drafter", "ngram", "--resources.cpus_per_actor", "1", *settings]
        with driver("jobs.generate", *command, stderr=subprocess.PIPE) as job:
            wait_until(lambda: job.poll() is not None or committed(out) >= before + 2, "two more files")
            job.send_signal(number)
            printed = job.communicate(timeout=PATIENCE)[1]
        return job.returncode, printed, committed(out)

    code, _, first = stop(signal.SIGKILL)
    assert code == -signal.SIGKILL
    code, printed, second = stop(signal.SIGTERM)
    assert code == 143, printed
    assert f"{len(prompts) - 25 * first} of {len(prompts)} rows to generate" in printed
    assert "submit the job again to go on" in printed
    assert first + 2 <= second < len(prompts) / 25
    # Rows that had begun were finished, and those of parts that have others left are kept. There are none if the signal
    # came before a row of the next part began, and on a busy machine a part may be committed after they were saved.
    kept = 0
    if (unfinished := out / "_unfinished.parquet").exists():
        parts = {path.stem for path in (out / "data").glob("*.parquet")}
        kept = sum(row["generated"] is not None and row["part"] not in parts for row in read_rows(unfinished))
    done = run(source, *settings, output=out)
    assert f"{len(prompts) - 25 * second - kept} of {len(prompts)} rows to generate" in done.stderr
    assert_whole(done, plain, prompts)


def committed(out: Path) -> int:
    """Parts in the output."""
    return len(list((out / "data").glob("*.parquet")))
