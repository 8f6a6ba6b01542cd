"""Rows that are programs, on real Ray with a real engine."""

from __future__ import annotations

import base64
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from drafter import SpeculativeLM
from drafter.engine.handle import Handle
from drafter.errors import EngineError, RequestTimeoutError
from drafter.prompt import Prompt
from drafter.requests import Request, SamplingParams, sample_seed
from jobs.compare import main as compare
from jobs.report import main as report
from pipeline.errors import RowError
from pipeline.generate.rollout import Program, ProgramRow, Rollout
from pipeline.generate.staging import BYTES
from pipeline.output.columns import MOST_PROGRAM_COLUMNS
from tests.pipeline.conftest import Driver, Run, job_arguments, write_jsonl
from tests.pipeline.generate.test_chaos import committed, kill_engines
from tests.support import programs
from tests.support.faults import FragileEngine
from tests.support.waiting import PATIENCE, wait_until

PROGRAMS = "tests.support.programs"


def rows(count: int, folder: Path) -> list[dict[str, Any]]:
    return [{"prompt": f"how many apples and pens {n}", "n": n, "notes": str(folder)} for n in range(count)]


def test_programs_of_three_rounds_with_engines_killed(
    run: Run, plain: SpeculativeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing is there twice, and tokens are those of the engine, call by call."""
    slow = partial(FragileEngine, notes=tmp_path, step_seconds=0.02)
    monkeypatch.setattr("pipeline.engines.models.EngineSpec", slow)
    source = write_jsonl(tmp_path / "in.jsonl", rows(30, tmp_path))
    killer = threading.Thread(target=kill_engines, args=[tmp_path, signal.SIGKILL, signal.SIGKILL])
    killer.start()
    done = run(source, "--rollout", f"{PROGRAMS}:write_judge_mend", "--writing.rows_per_file", 8)
    killer.join()
    assert done.code == 0, done.stderr
    assert [row["n"] for row in done.rows] == [n for n in range(30) if n != 7]
    assert [row["error_type"] for row in done.errors] == ["ProgramFailed"]
    assert re.search(
        r"row in.jsonl:8: .*write_judge_mend failed in line \d+: LookupError: seven", done.errors[0]["message"]
    )
    begun = Counter((tmp_path / "begun").read_text().split())
    assert begun.keys() == {str(n) for n in range(30)}
    assert begun.total() - 30 <= 2 * 8  # so many are inside of an engine
    for row in done.rows[::5]:
        chat, said = [{"role": "user", "content": row["prompt"]}], []
        for number, question in enumerate(("is it good", "mend it", "")):
            more: dict[str, Any] = {"temperature": 0.8, "seed": sample_seed(row["seed"], 2)} if number == 2 else {}
            (answer,) = plain.generate(chat, max_new_tokens=12, **more)
            said.append(answer.token_ids)
            chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
        assert row["said"] == said
    for row in done.rows:
        assert row["num_calls"] == len(row["said"]) == 3
        assert row["num_output_tokens"] == sum(map(len, row["said"]))
        assert row["num_cached_tokens"] == sum(row["cached"])
        assert row["cached"][1] > 0  # the second round began where the first one had ended
        assert row["cached"][2] > 0
        assert row["valid"] == (row["n"] % 3 != 1)


def test_as_many_valid_rows_as_are_asked_for(run: Run, tmp_path: Path) -> None:
    """And more of them later; each part is told of when it is there."""
    source = write_jsonl(tmp_path / "in.jsonl", [*rows(60, tmp_path), "{broken", *rows(90, tmp_path)[60:]])
    told = tmp_path / "told"
    settings: list[Any] = ["--rollout", f"{PROGRAMS}:write_judge_mend", "--writing.rows_per_file", 8]
    settings += ["--sampling.max_new_tokens", 4, "--on_part", f"{PROGRAMS}:tell", "--cost.per_gpu_hour", 2]
    done = run(source, *settings, "--stop_after_valid", 20)
    assert done.code == 0, done.stderr
    first = done.rows
    assert sum(row["valid"] for row in first) == 20
    assert "20 rows are valid, as many as are wanted" in done.stderr
    ran = json.loads((done.folder / "run.json").read_text())
    result = ran["result"]
    assert result["rows"] == {"valid": 20, "invalid": len(first) - 20, "failed": len(done.errors)}
    assert ran["rows"] == len(first) + len(done.errors) < 91
    assert result["tokens"]["valid"] == sum(row["num_output_tokens"] for row in first if row["valid"])
    assert result["tokens"]["invalid"] == sum(row["num_output_tokens"] for row in first if not row["valid"])
    assert result["valid_tokens_per_second"] > 0
    (submission,) = json.loads((done.folder / "status.json").read_text())["submissions"]
    assert submission["tokens"] == sum(row["num_output_tokens"] for row in first)
    assert (result["gpu_hours"], result["cost"]) == (0, None)  # there is no GPU
    files = [str(path) for path in sorted((done.folder / "data").iterdir())]
    assert sorted(set(told.read_text().split())) == files
    # The same again: nothing is left to do. A higher number goes on.
    assert "nothing is left to do" in run(source, *settings, "--stop_after_valid", 20).stdout
    more = run(source, *settings, "--stop_after_valid", 50)
    assert more.code == 0, more.stderr
    assert sum(row["valid"] for row in more.rows) == 50
    assert len({row["n"] for row in more.rows}) == len(more.rows)
    kept = {row["n"]: row["said"] for row in more.rows}
    assert [kept[row["n"]] for row in first] == [row["said"] for row in first]
    begun = Counter((tmp_path / "begun").read_text().split())
    assert {begun[str(row["n"])] for row in first} == {1}
    # The input has sixty.
    every = run(source, *settings, "--stop_after_valid", 70)
    assert every.code == 0, every.stderr
    assert sum(row["valid"] for row in every.rows) == 60
    assert (len(every.rows), len(every.errors)) == (89, 2)
    assert "60 of 70 valid rows: the input has no more" in every.stderr


@pytest.mark.slow
def test_many_programs_with_drivers_killed(run: Run, driver: Driver, model: Path, tmp_path: Path) -> None:
    """First so many valid rows as are asked for, then all of them: none is lost, none is there twice."""
    source, out = write_jsonl(tmp_path / "in.jsonl", rows(250, tmp_path)), tmp_path / "out"
    settings: list[Any] = ["--rollout", f"{PROGRAMS}:write_judge_mend", "--writing.rows_per_file", 10]
    settings += ["--sampling.max_new_tokens", 4]
    for _ in range(2):
        before, command = committed(out), job_arguments(source, out, model, *settings, "--stop_after_valid", 150)
        with driver("jobs.generate", *command) as job:
            wait_until(lambda: job.poll() is not None or committed(out) >= before + 3, "three more files")  # noqa: B023
            assert job.poll() is None
            job.kill()
    some = run(source, *settings, "--stop_after_valid", 150)
    assert some.code == 0, some.stderr
    assert sum(row["valid"] for row in some.rows) == 150
    every = run(source, *settings)
    assert every.code == 0, every.stderr
    assert sorted(row["n"] for row in every.rows) == [n for n in range(250) if n != 7]
    assert [row["error_type"] for row in every.errors] == ["ProgramFailed"]
    kept = {row["n"]: row["said"] for row in every.rows}
    assert all(kept[row["n"]] == row["said"] for row in some.rows)


def test_columns_have_one_type_in_all_files(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Several calls at once, a record, an input that grows."""
    given = [{"prompt": f"how many {n}", "n": n} for n in range(10)]
    source = write_jsonl(tmp_path / "in.jsonl", given[:8])
    settings = ("--rollout", f"{PROGRAMS}:best_of", "--writing.rows_per_file", 3, "--engine.max_num_seqs", 2)
    done = run(source, *settings)
    assert done.code == 0, done.stderr
    before = [row["ids"] for row in done.rows]
    write_jsonl(source, given)
    grown = run(source, *settings)
    assert grown.code == 0, grown.stderr
    assert "2 of 10 rows to generate" in grown.stderr
    files = [str(path) for path in sorted((grown.folder / "data").iterdir())]
    assert len({str(pyarrow.parquet.read_schema(file)) for file in files}) == 1
    found = pyarrow.dataset.dataset(files).to_table().to_pylist()
    assert [row["n"] for row in found] == list(range(10))
    assert [row["ids"] for row in found[:8]] == before
    for row in found:
        n = row["n"]
        assert json.loads(row["mixed"]) == ({"a": [1, "x"]} if n % 2 else n)
        assert row["seldom"] == (True if n == 5 else None)
        assert row["verdict"] in ("yes", "no")
        assert row["valid"] is True
        assert len({tuple(ids) for ids in row["ids"]}) == 3  # each call has a seed of its own
    # The report has sums over them; what compares token by token says why it cannot.
    assert report([str(grown.folder)]) == 0
    page = (grown.folder / "report.html").read_text()
    assert f"{sum(row['num_output_tokens'] for row in found):,}" in page
    assert "New tokens of valid rows" in page
    assert "Speculation, step by step" not in page
    capfd.readouterr()
    assert compare([str(grown.folder), str(grown.folder)]) == 2
    assert "is of programs (rollout), whose rows have no token_ids: take another output" in capfd.readouterr().err


@pytest.mark.parametrize("fate", ["blocks", "waits", "endless"])
def test_a_program_that_does_not_end_has_a_bound(fate: str) -> None:
    asked: list[Handle] = []

    def submit(request: Request) -> Handle:
        asked.append(Handle(request, stream=False))
        return asked[-1]

    program = make(fate, submit, seconds=0.2)
    with pytest.raises(RequestTimeoutError, match=r"mixed_fates had not ended after limits.row_seconds, 0.2"):
        program.future.result(PATIENCE)
    assert all(handle.cancelled for handle in asked)


def test_an_engine_that_fails_is_no_error_of_a_row() -> None:
    """Another one begins the program again, whatever the program does with the error."""

    def submit(request: Request) -> Handle:
        raise EngineError("device lost")

    with pytest.raises(EngineError, match="device lost"):
        make("mends", submit).future.result(PATIENCE)


def make(fate: str, submit: Callable[[Request], Handle], seconds: float = PATIENCE) -> Program:
    rollout: Any = Rollout(f"{PROGRAMS}:mixed_fates", None, seconds, frozenset())  # type: ignore[arg-type]
    row = ProgramRow("a", {"fate": fate, "prompt": "x"}, SamplingParams())
    return Program(rollout, programs.mixed_fates, row, lambda asked: Prompt([1]), submit)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--rollout", "programs"], "rollout must be module:function, such as programs:write, not 'programs'"),
        (["--rollout", "nowhere:f"], "rollout nowhere:f cannot be imported from .*: ModuleNotFoundError: No module"),
        (["--rollout", f"{PROGRAMS}:gone"], "rollout .*:gone cannot be imported from .*: AttributeError"),
        (["--rollout", f"{PROGRAMS}:number"], "rollout .*:number is 5, not a function"),
        (["--rollout", f"{PROGRAMS}:not_async"], r"must be an async function .* f\(row, generate\); it is not async"),
        (["--rollout", f"{PROGRAMS}:one_argument"], "must be an async function .*; too many positional"),
        (["--rollout", f"{PROGRAMS}:ask", "--reading.prompt_column", "n"], "leave out reading.prompt_column"),
        (["--rollout", f"{PROGRAMS}:ask", "--reading.format", "openai"], "leave out reading.format"),
        (["--on_part", "nowhere:f"], "on_part nowhere:f cannot be imported"),
        (["--stop_after_valid", 0], "stop_after_valid must be at least 1, not 0"),
        (["--cost.per_gpu_hour", -1], "cost.per_gpu_hour must be at least 0, not -1"),
    ],
)
def test_what_cannot_be_run_is_refused(refused: Run, tmp_path: Path, settings: list[Any], message: str) -> None:
    done = refused(write_jsonl(tmp_path / "in.jsonl", [{"n": 1}]), *settings)
    assert done.code == 2
    assert re.search(message, done.error)


def test_a_program_of_one_call_has_the_rows_own_tokens(run: Run, tmp_path: Path) -> None:
    """With the row's settings and seeds, greedy and sampled, samples, too."""
    given = [{"prompt": f"how many {n}", "sampling": {"temperature": n % 2}} for n in range(4)]
    source = write_jsonl(tmp_path / "in.jsonl", given)
    settings = ("--sampling.seed", 3, "--reading.samples", 2, "--reading.id_column", "prompt")
    plain = run(source, *settings, output=tmp_path / "plain")
    done = run(source, *settings, "--rollout", f"{PROGRAMS}:ask")
    assert (plain.code, done.code) == (0, 0), done.stderr
    summed = ("request_id", "num_prompt_tokens", "num_output_tokens", "seed", "finish_reason", "num_decode_steps")
    assert [[row["ids"], row["answer"], *(row[name] for name in summed)] for row in done.rows] == [
        [row["token_ids"], row["text"], *(row[name] for name in summed)] for row in plain.rows
    ]
    assert {row["num_calls"] for row in done.rows} == {1}
    assert not {"text", "token_ids", "program_columns"} & done.rows[0].keys()
    assert len({row["seed"] for row in done.rows}) == 8


def test_fates_of_programs_are_their_rows_own(run: Run, tmp_path: Path) -> None:
    why = {
        "no dict": "returned ['a', 'list'], and not a dict of columns by name",
        "taken": "returned a column 'num_calls', which the row has already: give it another name",
        "input": "returned a column 'prompt', which the row has already",
        "no json": "returned a column 'answer' that JSON cannot hold",
        "valid": "returned 'yes' as valid, which is True, False or None",
        "refused": "RequestError: temperature must be at least 0, not -1",
        "unknown": "RequestError: unknown setting heat",
        "exits": "SystemExit: 3",
    }
    fates = [*why, "mends", *(["fine"] * 12)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "how many", "fate": one} for one in fates])
    done = run(source, "--rollout", f"{PROGRAMS}:mixed_fates")
    assert done.code == 0, done.stderr
    said = {fates[int(one["request_id"].partition(":")[2]) - 1]: one for one in done.errors}
    assert said.keys() == why.keys()
    for fate, message in why.items():
        row = f"row {said[fate]['request_id']}: {PROGRAMS}:mixed_fates"
        assert said[fate]["message"].startswith(row)
        assert message in said[fate]["message"]
        assert said[fate]["error_type"] == "ProgramFailed"
    answers = Counter(row["answer"] for row in done.rows)
    assert len(done.rows) == 13
    assert sorted(answers.values()) == [1, 12]
    assert any(one.startswith("mended: the prompt") for one in answers)


@pytest.mark.parametrize("value", [5, "not base64!", None, {"a": 1}])
def test_an_object_of_the_row_that_looks_like_bytes_stays(value: Any) -> None:
    rollout = Rollout("x:y", None, 1, frozenset())  # type: ignore[arg-type]
    asked, bytes_ = {"a": {BYTES: value}}, {"b": {BYTES: base64.b64encode(b"\0x").decode()}}
    sampling = json.dumps(asdict(SamplingParams(seed=1)))
    staged = pa.table({"request_id": ["1"], "asked": [json.dumps(asked | bytes_)], "sampling": [sampling]})
    assert rollout.rows(staged)["1"].row == {**asked, "b": b"\0x"}


def test_a_name_with_half_a_character_is_its_rows_error() -> None:
    async def half(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
        return {"a\ud800": 1}

    with pytest.raises(RowError, match=r"returned a column 'a\\ud800' that JSON cannot hold"):
        of_function(half).future.result(PATIENCE)


@pytest.mark.parametrize("levels", [300, 900])
def test_a_value_of_very_many_levels_is_its_rows_error(levels: int) -> None:
    """The part of the row could not be written."""

    async def nested(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return {"a": value}

    with pytest.raises(RowError, match=r"a column 'a' that JSON cannot hold: it is nested too deeply: more than 200"):
        of_function(nested).future.result(PATIENCE)


def test_a_row_returns_so_many_columns_at_most() -> None:
    async def count(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
        return {f"word {n}": 1 for n in range(MOST_PROGRAM_COLUMNS + 1)}

    with pytest.raises(RowError, match=r"returned 1,001 columns, and up to 1,000 are kept: put what differs"):
        of_function(count).future.result(PATIENCE)


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def fails(row: dict[str, Any], generate: Callable[..., Any], error: Exception) -> dict[str, Any]:
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("boom"), r"failed in line \d+: ValueError: boom"),
        (SilentError(), r"failed in line \d+: SilentError, which cannot say why: RuntimeError"),
    ],
)
def test_an_error_of_a_partial_function_is_said_at_once(error: Exception, message: str) -> None:
    with pytest.raises(RowError, match=message):
        of_function(partial(fails, error=error)).future.result(PATIENCE)


def of_function(function: Callable[..., Any]) -> Program:
    rollout: Any = Rollout("x:y", None, PATIENCE, frozenset())  # type: ignore[arg-type]
    row = ProgramRow("a", {}, SamplingParams())
    return Program(rollout, function, row, lambda asked: Prompt([1]), lambda request: Handle(request, stream=False))
