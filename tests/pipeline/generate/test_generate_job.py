"""The job from end to end, on real Ray with a real engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest

from drafter import SpeculativeLM
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run, write_jsonl
from tests.support.prepared_workers import driver_with_a_cluster
from tests.support.staging import content_seed
from tests.support.waiting import PATIENCE, wait_until

QUESTIONS = ["how many apples", "how many pens does she have", "she", "does she have apples and pens " * 3]
INPUT: list[Any] = [
    *({"prompt": f"{QUESTIONS[n % 4]} {n}", "n": n, "text": "theirs"} for n in range(9)),
    {"prompt": "how many", "sampling": {"temperature": 0.9, "max_new_tokens": 5, "seed": 4}},
    {"prompt": ""},
    {"prompt": 5},
    {"prompt": "x " * 400},
    "{broken",
    {"prompt": "how many", "sampling": {"temperature": -1}},
    {"prompt": "how many", "sampling": {"temperature": 0.9}},
    {"n": 3},
    {"prompt": "does she", "seed": 77, "sampling": {"stop": ["a"]}},
]
BAD = {11: "BadPrompt", 12: "BadRow", 13: "Refused", 14: "BadRow", 15: "BadSampling", 17: "BadPrompt"}


def expected(plain: SpeculativeLM, row: dict[str, Any], **settings: Any) -> Any:
    chat = [{"role": "user", "content": row["prompt"]}]
    return plain.generate([chat], **{"max_new_tokens": 12, **settings})[0]


def test_every_row_is_generated_once_or_explained(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    source, begun = write_jsonl(tmp_path / "in.jsonl", INPUT), datetime.now(UTC)
    done = run(source, "--writing.rows_per_file", 5, "--sampling.seed", 9)
    assert done.code == 0, done.stderr

    # n_in = n_ok + n_errors, each in its place.
    assert {int(row["request_id"].split(":")[1]): row["error_type"] for row in done.errors} == BAD
    assert [row["request_id"] for row in done.rows] == [f"in.jsonl:{n}" for n in range(1, 19) if n not in BAD]
    assert [len(rows) for rows in done.parts.values()] == [5, 5, 0, 2]
    by_line = {int(row["request_id"].split(":")[1]): row for row in done.rows}

    # Token for token what the engine itself gives, with each row's settings and seed.
    settings: dict[int, dict[str, Any]] = {
        10: {"temperature": 0.9, "max_new_tokens": 5, "seed": 4},
        16: {"temperature": 0.9, "seed": content_seed(9, sampling='{"temperature": 0.9}', prompt="how many")},
        18: {"seed": 77, "stop": ("a",)},
    }
    for line, row in by_line.items():
        generation = expected(plain, row, **settings.get(line, {}))
        assert row["token_ids"] == generation.token_ids
        assert (row["text"], row["finish_reason"]) == (generation.text, generation.finish_reason)
        assert row["prompt_token_ids"] == plain.encode([{"role": "user", "content": row["prompt"]}])
        assert row["num_prompt_tokens"] == generation.num_prompt_tokens
        assert row["num_output_tokens"] == len(generation.token_ids)
        assert row["seed"] == settings.get(line, {}).get("seed", content_seed(9, prompt=row["prompt"]))
        assert sum(row["acceptance_histogram"]) == row["num_decode_steps"]
        assert len(row["per_step_accepted"]) == row["num_decode_steps"]
        assert sum(row["per_step_accepted"]) == row["num_accepted_draft_tokens"]
        assert begun < row["finished_at"] < datetime.now(UTC)
        assert 0 < row["generation_seconds"] < (row["finished_at"] - begun).total_seconds()
        assert row["mean_acceptance_length"] == pytest.approx(row["num_output_tokens"] / row["num_decode_steps"])

    # Every input column is there; theirs gives way to ours.
    assert by_line[3]["n"] == 2
    assert by_line[3]["prompt"] == INPUT[2]["prompt"]
    assert by_line[3]["input_text"] == "theirs"
    assert json.loads(by_line[10]["sampling"]) == INPUT[9]["sampling"]

    # The errors tell the row, as it was.
    inputs = {row["request_id"]: row["input"] for row in done.errors}
    assert inputs["in.jsonl:14"] == "{broken"
    assert json.loads(inputs["in.jsonl:12"]) == {"prompt": 5}
    assert json.loads(inputs["in.jsonl:13"])["prompt"] == "x " * 400

    # What was run, and what came of it.
    ran = json.loads((done.folder / "run.json").read_text())
    assert ran["state"] == "finished"
    assert ran["rows"] == 18
    assert ran["config"]["sampling"]["seed"] == 9
    assert ran["base_fingerprint"] == plain.base.fingerprint
    assert (ran["verifier"], ran["lossless"]) == ("exact", True)
    assert ran["versions"]["ray"]
    tokens = sum(row["num_output_tokens"] for row in done.rows)
    steps = sum(row["num_decode_steps"] for row in done.rows)
    assert "12 finished, 6 failed" in done.stdout
    assert f"{tokens:,} in {steps:,}" in done.stdout
    assert f"{tokens / steps:.2f} tokens a step" in done.stdout
    assert "18/18 rows" in done.stderr
    assert not (done.folder / "_temporary").exists()


@pytest.mark.slow
def test_a_job_whose_ray_ends_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end of its head process; that of the raylet ends an endpoint in its tests."""
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a cluster of its own
    source, out = (
        write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in QUESTIONS * 150]),
        tmp_path / "out",
    )
    command = ["-m", "jobs.generate", "--input", source, "--output", out, "--model", model, "--drafter", "none"]
    command += ["--writing.rows_per_file", "10", "--engine.max_num_seqs", "2", "--engine.num_draft_tokens", "0"]
    with driver_with_a_cluster(*command, stderr=subprocess.PIPE) as job:
        wait_until(lambda: job.poll() is not None or len(list((out / "data").glob("*"))) >= 2, "two files")
        (process,) = [one for one in psutil.Process(job.pid).children(recursive=True) if one.name() == "gcs_server"]
        process.kill()
        printed = job.communicate(timeout=PATIENCE)[1]
    assert job.returncode == 1, printed
    (told,) = (line for line in printed.splitlines() if line.startswith("error: "))  # Ray may have a last word, too
    assert told.startswith("error: the job failed: Ray's ")
    assert told.endswith("(the GCS) has ended; submit it again to go on")
    assert json.loads((out / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_auto_says_what_it_chose(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{QUESTIONS[n % 4]} {n}"} for n in range(40)])
    settings = ["--engine.num_draft_tokens", "auto", "--sampling.ignore_eos", True, "--sampling.max_new_tokens", 80]
    done = run(source, *settings, drafter="auto")
    assert done.code == 0, done.stderr
    asked = expected(plain, {"prompt": f"{QUESTIONS[1]} 1"}, max_new_tokens=80, ignore_eos=True)
    assert done.rows[1]["token_ids"] == asked.token_ids
    told = json.loads((done.folder / "run.json").read_text())["speculation"]
    assert told["steps"] == sum(choice["steps"] for choice in told["by_rows"]) > 0
    decided = [choice for choice in told["by_rows"] if choice["drafts"] is not None]
    assert {choice["chosen"] for choice in decided} <= {"cacheback", "memory"}
    assert all(choice["drafts"] == (choice["token_gain"] > choice["token_cost"]) for choice in decided)
    assert told["sentences"]
    assert all(sentence in done.stdout for sentence in told["sentences"])


@pytest.mark.slow
def test_rows_of_a_lenient_verifier_are_marked_everywhere(run: Run, tmp_path: Path) -> None:
    rows = [{"prompt": QUESTIONS[n % 4], "seed": n, "sampling": {"temperature": n % 2}} for n in range(8)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = ["--verifier", "typical", "--verifier.epsilon", 0, "--verifier.delta", 0]
    done = run(source, *settings)
    assert done.code == 0, done.stderr
    assert len(done.rows) == 8
    lenient = 0
    for row in done.rows:
        assert (row["lossless"], row["verifier"]) == (False, "typical")
        assert row["num_lenient_tokens"] == len(row["lenient_positions"]) <= row["num_accepted_draft_tokens"]
        assert all(place < row["num_output_tokens"] for place in row["lenient_positions"])
        if row["seed"] % 2 == 0:  # greedy rows are decoded exactly
            assert row["num_lenient_tokens"] == 0
        lenient += row["num_lenient_tokens"]
    assert lenient > 0
    ran = json.loads((done.folder / "run.json").read_text())
    assert (ran["verifier"], ran["lossless"]) == ("typical", False)
    assert ran["verifier_settings"] == {"epsilon": 0, "delta": 0}
    again = run(source)
    assert again.code == 2
    assert "belongs to another job (verifier.name was" in again.stderr


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_submitting_again_goes_on_where_the_job_stopped(run: Run, finished: FinishedJob) -> None:
    source, done = finished.source, finished.outcome
    before = snapshot(done.folder)

    # A finished job writes nothing, whatever the batches.
    repeated = run(source, *JOB_SETTINGS, "--writing.rows_per_file", 3)
    assert repeated.code == 0
    assert (
        repeated.stdout == f"nothing is left to do: of 9 rows 7 are finished and 2 failed; they are in {done.folder}\n"
    )
    assert snapshot(done.folder) == before

    # Another meaning is refused, and named.
    refused = run(source, *JOB_SETTINGS, "--sampling.temperature", 0.5)
    assert refused.code == 2
    assert "(sampling.temperature was 0.3, is now 0.5): choose another output" in refused.error
    source_now = source.read_bytes()
    # A dry run says what has become of the rows.
    source.write_bytes(source_now.replace(b" 5", b" 6") + b'{"prompt": "one more"}\n')
    counted = run(source, *JOB_SETTINGS, "--dry_run")
    assert counted.code == 0
    assert counted.stdout.startswith(
        "dry run: 10 rows: 8 kept, 1 changed, 1 new; 2 of them will be errors: "
        "in<i>.jsonl:8: column 'prompt' is empty; in<i>.jsonl:9: the line is not JSON"
    )
    source.write_bytes(source_now)
    assert snapshot(done.folder) == before

    # What is missing is made again, to the byte of its rows, and nothing else is touched; by another drafter, too.
    rows = done.rows
    lost = sorted((done.folder / "data").iterdir())[1]
    lost.unlink()
    (done.folder / "_temporary").mkdir()
    (done.folder / "_temporary" / "torn.parquet").write_bytes(b"half")
    finished.reopen()
    resumed = run(source, *JOB_SETTINGS, "--writing.rows_per_file", 3, drafter="none")
    assert resumed.code == 0, resumed.stderr
    assert "2 of 9 rows to generate" in resumed.stderr
    assert [(row["request_id"], row["token_ids"]) for row in resumed.rows] == [
        (row["request_id"], row["token_ids"]) for row in rows
    ]
    assert [row["drafter"] for row in resumed.rows] == ["ngram", "ngram", "none", "none", "ngram", "ngram", "ngram"]
    drafters = json.loads((done.folder / "run.json").read_text())["drafters"]
    assert drafters == [{"drafter": "ngram", "heads": {}}, {"drafter": "none", "heads": {}}]
    after = snapshot(done.folder)
    untouched = [path for path in before if "/data/" in path and path != str(lost)]
    assert len(untouched) == 4
    assert all(after[path] == before[path] for path in untouched)
    assert not (done.folder / "_temporary").exists()

    # Its status counts the rows and the errors of both submissions, and measures only those of its own.
    status = json.loads((done.folder / "status.json").read_text())
    assert (status["state"], status["rows_done"], status["errors"]) == ("finished", 9, 2)
    assert [one["rows"] for one in status["submissions"]] == [9, 2]
    assert resumed.stderr.splitlines()[-1].startswith("9/9 rows")


def test_an_output_begun_with_another_draw_is_refused(run: Run, finished: FinishedJob) -> None:
    """Its seeds would go on with other tokens."""
    file = finished.outcome.folder / "run.json"
    ran = json.loads(file.read_text())
    file.write_text(json.dumps({**ran, "state": "running", "meaning": {**ran["meaning"], "draw": "another"}}))
    refused = run(finished.source, *JOB_SETTINGS)
    assert refused.code == 2
    assert "the version that began it draws other tokens from the same seeds): choose another" in refused.error
    file.write_text(json.dumps(ran))
    assert run(finished.source, *JOB_SETTINGS).code == 0


@pytest.mark.slow
def test_rows_share_a_limited_memory(run: Run, plain: SpeculativeLM, finished_job: FinishedJob, tmp_path: Path) -> None:
    row = plain.engine.batch.capacity * plain.base.new_cache(1, 1).nbytes / 2**30
    source = shutil.copy(finished_job.source, tmp_path)
    refused = run(source, *JOB_SETTINGS, "--engine.kv_gib", row / 2)
    assert refused.code == 2
    assert "raise kv_gib or lower max_model_len" in refused.error
    done = run(source, *JOB_SETTINGS, "--engine.kv_gib", row * 1.5, "--engine.max_num_seqs", 8)
    assert done.code == 0, done.stderr
    tokens = [row["token_ids"] for row in finished_job.outcome.rows]
    assert [row["token_ids"] for row in done.rows] == tokens


@pytest.mark.slow
def test_a_resubmission_writes_what_is_missing_and_no_more(run: Run, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"how many {n}"} for n in range(20)])
    settings = ("--writing.rows_per_file", 2)
    done = run(source, *settings)
    rows = [(row["request_id"], row["token_ids"]) for row in done.rows]
    state = json.loads((done.folder / "run.json").read_text())
    files = sorted((done.folder / "data").iterdir())
    assert len(files) == 10
    for count in (10, 3):
        kept = files[:count]
        for lost in files[len(kept) :]:
            lost.unlink()
        (done.folder / "run.json").write_text(json.dumps({**state, "state": "running"}))
        before = snapshot(done.folder)
        resumed = run(source, *settings)
        assert resumed.code == 0, resumed.stderr
        assert (f"{20 - 2 * count} of 20 rows to generate" in resumed.stderr) == (count < 10)
        after = snapshot(done.folder)
        assert all(after[str(file)] == before[str(file)] for file in kept)
        assert [(row["request_id"], row["token_ids"]) for row in resumed.rows] == rows


@pytest.mark.slow
def test_parquet_messages_and_ids_of_their_own(run: Run, plain: SpeculativeLM, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"{QUESTIONS[n]} {n}"}] for n in range(3)]
    table = pa.table({"chat": chats, "key": [30, 10, 20], "stamp": pa.array([1, 2, 3], pa.timestamp("ms"))})
    (tmp_path / "in").mkdir()
    pa.parquet.write_table(table, tmp_path / "in" / "a.parquet")
    settings = ("--reading.messages_column", "chat", "--reading.id_column", "key")
    done = run(tmp_path / "in", *settings, drafter="none")
    assert done.code == 0, done.stderr
    assert [row["request_id"] for row in done.rows] == ["30", "10", "20"]
    assert [row["chat"] for row in done.rows] == chats
    alone = [plain.generate(chat, max_new_tokens=12)[0] for chat in chats]
    assert [row["token_ids"] for row in done.rows] == [generation.token_ids for generation in alone]
    assert pa.parquet.read_table(done.folder / "data").schema.field("stamp").type == pa.timestamp("ms")
    assert done.errors == []
    assert "speculation none: every step was plain decoding" in done.stdout
    # Columns that were not asked for are not there.
    assert not {"sample", "logprobs"} & set(done.rows[0])
