"""Kinds of bad input: each is one clear line and exit code 2, or rows in `errors/` beside unharmed ones."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter.ctc.config import CTCHeadConfig
from drafter.ctc.head import CTCHead
from drafter.heads.checkpoint import save_head
from drafter.heads.contract import Provenance
from jobs.generate import main
from pipeline.cluster.ray_cluster import Cluster, Node
from tests.pipeline.conftest import Run, write_jsonl

GOOD = [{"prompt": "how many", "id": 1}, {"prompt": "apples", "id": 2}]


def parquet(path: Path, **columns: Any) -> Path:
    """Write a Parquet file of these columns."""
    pa.parquet.write_table(pa.table(columns), path)
    return path


def damaged_parquet(path: Path) -> Path:
    """A Parquet file whose middle is zeros: the footer is fine, the pages are not."""
    parquet(path, prompt=[str(number) * 50 for number in range(5_000)])
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
    path.write_bytes(content)
    return path


def text(path: Path, content: str | bytes) -> Path:
    """Write a file as it is."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def folder(path: Path, *names: str) -> Path:
    """A folder of good files by these names."""
    path.mkdir()
    for name in names:
        write_jsonl(path / name, GOOD)
    return path


def files_that_differ(place: Path) -> Path:
    """A folder of two Parquet files, of which only the first has prompts."""
    parquet(place / "a.parquet", prompt=["x"])
    parquet(place / "b.parquet", other=["x"])
    return place


Make = Callable[[Path], list[Any]]

REFUSED: dict[str, tuple[Make, str]] = {
    "missing file": (lambda d: [d / "nowhere.jsonl"], "does not exist"),
    "missing bucket scheme": (lambda d: ["gopher://bucket/x.jsonl"], "cannot be opened"),
    "pattern without a match": (lambda d: [f"{folder(d / 'in', 'a.jsonl')}/*.parquet"], "matches no file"),
    "folder without a readable file": (lambda d: [folder(d / "in", "a.md", "b.bin")], "holds no readable file"),
    "folder of two formats": (lambda d: [folder(d / "in", "a.jsonl", "b.txt")], "several formats (jsonl, text)"),
    "name without a format": (lambda d: [folder(d / "in", "data") / "data"], "set reading.format"),
    "empty file": (lambda d: [text(d / "a.jsonl", "")], "has no rows"),
    "only blank lines": (lambda d: [text(d / "a.txt", "\n\n\n")], "has no rows"),
    "CSV of only a header": (lambda d: [text(d / "a.csv", "prompt\n")], "has no rows"),
    "Parquet without rows": (lambda d: [parquet(d / "a.parquet", prompt=pa.array([], pa.string()))], "has no rows"),
    "no prompt column": (lambda d: [write_jsonl(d / "a.jsonl", [{"q": "x"}])], "has no column 'prompt' (it has q)"),
    "no such prompt column": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--reading.prompt_column", "question"],
        "has no column 'question' (it has prompt, id): set reading.prompt_column",
    ),
    "no such id column": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--reading.id_column", "key"],
        "has no column 'key' (it has prompt, id): set reading.id_column",
    ),
    "prompts that are numbers": (lambda d: [parquet(d / "a.parquet", prompt=[1, 2])], "holds int64, not text"),
    "messages that are numbers": (
        lambda d: [parquet(d / "a.parquet", messages=[1, 2])],
        "column 'messages' of",
    ),
    "ids that are fractions": (
        lambda d: [parquet(d / "a.parquet", prompt=["x"], id=[0.5]), "--reading.id_column", "id"],
        "ids are text or integers",
    ),
    "not Parquet": (lambda d: [text(d / "a.parquet", "prompt\nx\n")], "cannot be read as parquet"),
    "Parquet cut short": (
        lambda d: [text(d / "b.parquet", parquet(d / "a.parquet", prompt=["x"] * 99).read_bytes()[:-20])],
        "cannot be read as parquet",
    ),
    "Parquet with damaged pages": (lambda d: [damaged_parquet(d / "a.parquet")], "cannot be read as parquet"),
    "CSV with a crooked row": (
        lambda d: [text(d / "a.csv", "prompt,x\na,1\nb,2,3\n")],
        "Expected 2 columns, got 3",
    ),
    "CSV that is not UTF-8": (lambda d: [text(d / "a.csv", b"prompt\ncaf\xe9\n")], "cannot be read as csv"),
    "CSV with twin columns": (lambda d: [text(d / "a.csv", "prompt,prompt\na,b\n")], "several columns named 'prompt'"),
    "gzip that is not": (lambda d: [text(d / "a.jsonl.gz", "plain")], "cannot be read as jsonl"),
    "JSON that is one array": (lambda d: [text(d / "a.json", json.dumps(GOOD))], "is not a JSON object"),
    "JSON over several lines": (lambda d: [text(d / "a.json", json.dumps(GOOD[0], indent=2))], "one object a line"),
    "UTF-16": (lambda d: [text(d / "a.txt", "prompt".encode("utf-16"))], "is not UTF-8: byte 1 is 0xff"),
    "model that is no folder": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--model", "./nowhere"],
        "model ./nowhere is not a folder with a model",
    ),
    "model folder without a model": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--model", folder(d / "model")],
        "it has no config.json",
    ),
    "model without a tokeniser": (
        lambda d: [
            write_jsonl(d / "a.jsonl", GOOD),
            "--model",
            text(folder(d / "model") / "config.json", '{"model_type": "llama"}').parent,
        ],
        "no tokenizer at",
    ),
    "drafter that is no folder": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--drafter", "/nowhere/head"],
        "drafter /nowhere/head is not a folder with a draft head",
    ),
    "drafter folder without a head": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--drafter", folder(d / "head")],
        "is not a draft head's folder",
    ),
    "output that is a file": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--output", text(d / "file", "x")],
        "is a file: give a folder",
    ),
    "output below a file": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--output", text(d / "file", "x") / "out"],
        "output",
    ),
    "output that cannot be written": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--output", "/proc/out"],
        "output /proc/out cannot be written to",
    ),
    "output that holds something else": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--output", folder(d / "other", "mine.jsonl")],
        "is not empty and has no run.json",
    ),
    "output with a damaged run.json": (
        lambda d: [write_jsonl(d / "a.jsonl", GOOD), "--output", text(folder(d / "o") / "run.json", "{").parent],
        "has a damaged run.json",
    ),
    "output in the input": (
        lambda d: [folder(d / "in", "a.jsonl"), "--output", d / "in" / "out"],
        "lies in the input",
    ),
}
REFUSED_ONCE_READ: dict[str, tuple[Make, str]] = {
    "column in the first file only": (
        lambda d: [files_that_differ(folder(d / "in"))],
        "b.parquet has no column 'prompt' (it has other)",
    ),
    "ids that are not unique": (
        lambda d: [write_jsonl(d / "a.jsonl", [*GOOD, GOOD[0]]), "--reading.id_column", "id"],
        "1 ids stand for several rows ('1': a.jsonl:1, a.jsonl:3)",
    ),
    "gzip cut short": (
        lambda d: [text(d / "a.txt.gz", gzip.compress(b"a prompt and more\n" * 100_000)[:-50])],
        "cannot be read as text",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_is_one_line_and_code_2(kind: str, refused: Run, tmp_path: Path) -> None:
    """Nobody waits for Ray to read it."""
    assert_refused(refused, *REFUSED[kind], tmp_path)


@pytest.mark.parametrize("kind", REFUSED_ONCE_READ)
def test_so_is_what_only_a_worker_finds(kind: str, run: Run, tmp_path: Path) -> None:
    assert_refused(run, *REFUSED_ONCE_READ[kind], tmp_path)


def assert_refused(run: Run, make: Make, message: str, tmp_path: Path) -> None:
    source, *settings = make(tmp_path)
    done = run(source, *settings)
    assert done.code == 2, done.stderr
    assert done.error.startswith("error: ")
    assert message in done.error
    assert "Traceback" not in done.stderr
    assert "\n" not in done.error
    assert not list(tmp_path.glob("**/data/*.parquet"))


def test_a_chat_needs_a_template(refused: Run, model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    done = refused(source, base=plain)
    assert done.code == 2
    assert "has no chat template" in done.error
    done = refused(source, "--reading.chat_template_kwargs", '{"enable_thinking": false}')
    assert done.code == 2
    assert "it reads no enable_thinking, which would have no effect: leave it out" in done.error


def test_more_than_the_machine_has(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.generate.job.connect", lambda: Cluster((Node(cpus=2, gpus=0),), may_grow=False))
    source = write_jsonl(tmp_path / "a.jsonl", GOOD)
    done = run(source, "--resources.cpus_per_actor", 3)
    assert done.code == 2
    assert "1 × 3 CPU cores for the engines are more than the 2 of this machine" in done.error
    done = run(source, "--resources.gpus_per_actor", 0.5)
    assert "1 × 0.5 GPUs for the engines are more than the 0 of this machine" in done.error


@pytest.mark.slow
def test_weights_that_are_damaged(run: Run, model: Path, tmp_path: Path) -> None:
    """Only the engine's process finds out; it says so once, without restarts, and so does the job's status."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run(write_jsonl(tmp_path / "a.jsonl", GOOD), base=damaged)
    assert done.code == 2
    assert done.error.startswith("error: model")
    assert "Traceback" not in done.stderr + done.stdout
    status = json.loads((done.folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["failure"] in done.error


@pytest.mark.slow
def test_a_head_of_another_base(run: Run, tmp_path: Path) -> None:
    head = CTCHead(CTCHeadConfig(hidden_size=32, vocab_size=320, num_heads=2, intermediate_size=32))
    head.provenance = Provenance("another", "0123456789abcdef")
    save_head(head, tmp_path / "head")
    done = run(write_jsonl(tmp_path / "a.jsonl", GOOD), drafter=str(tmp_path / "head"))
    assert done.code == 2
    assert "belongs to the target model 'another'" in done.error
    assert "Traceback" not in done.stderr + done.stdout


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    import pipeline.cluster.ray_cluster
    from pipeline.errors import NoClusterError

    def unreachable(**_: Any) -> None:
        raise ConnectionError("ray:// nobody\nanswers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", unreachable)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with pytest.raises(NoClusterError, match="could be joined: ray:// nobody answers: see whether one runs there"):
        pipeline.cluster.ray_cluster.connect()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(NoClusterError, match=r"could be started: ray:// .*RAY_raylet_start_wait_time_s=120"):
        pipeline.cluster.ray_cluster.connect()


def test_foreign_text_is_printed_and_not_obeyed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dataset's README has names with a terminal's escape sequences in them."""
    configs = [{"config_name": name, "data_files": "a.jsonl"} for name in ("\x1b]0;mine\x07a", "b")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    assert main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert "has several subsets (\\x1b]0;mine\\x07a, b): set reading.subset" in said
    assert all(line.isprintable() for line in said.splitlines())


def test_a_job_that_fails_is_code_1(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from pipeline.errors import JobError

    def failing(_: Any) -> None:
        raise JobError("disk\nfull")

    monkeypatch.setattr("pipeline.generate.job.generate", failing)
    assert main(["--input", "a", "--output", "b"]) == 1
    assert capfd.readouterr().err == "error: the job failed: disk full; submit it again to go on\n"

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device", "out/run.json")

    monkeypatch.setattr("pipeline.generate.job.generate", full)
    assert main(["--input", "a", "--output", "b"]) == 1
    assert "failed: [Errno 28] No space left on device: 'out/run.json'; submit it" in capfd.readouterr().err


@pytest.mark.slow
def test_a_row_that_overflows_the_model_harms_no_other(run: Run, model: Path, tmp_path: Path) -> None:
    """A token is finite in fp32 and infinite in fp16: rows that have it end with an error, and the others as alone."""
    overflowing = shutil.copytree(model, tmp_path / "model")
    (token,) = AutoTokenizer.from_pretrained(model)("z", add_special_tokens=False)["input_ids"]
    lm = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        lm.get_input_embeddings().weight[token] = 1e6
    lm.save_pretrained(overflowing)
    prompts = ["how many apples", "does she zzz", "how many pens", "z", "apples and pens", "she has z apples", "pens"]
    settings = ("--loading.dtype", "float16", "--engine.num_draft_tokens", 3)
    done = {}
    for name, some in (("all", prompts), ("good", [prompt for prompt in prompts if "z" not in prompt])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": prompt, "id": prompt} for prompt in some])
        done[name] = run(
            source, "--reading.id_column", "id", *settings, base=overflowing, output=tmp_path / name, drafter="ngram"
        )
        assert done[name].code == 0, done[name].stderr
    tokens = {name: {row["request_id"]: row["token_ids"] for row in outcome.rows} for name, outcome in done.items()}
    assert tokens["all"] == tokens["good"]
    assert {row["request_id"] for row in done["all"].errors} == {prompt for prompt in prompts if "z" in prompt}
    assert {row["error_type"] for row in done["all"].errors} == {"NotFinite"}


@pytest.mark.slow
def test_columns_that_parquet_cannot_hold_are_written_as_json(run: Run, tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(58):
        deep = {"x": deep}
    rows = [{"prompt": f"how many {n}", "meta": {}, "deep": deep, "late": {"a": n} if n > 1 else {}} for n in range(4)]
    done = run(write_jsonl(tmp_path / "in.jsonl", rows), "--writing.rows_per_file", 2)
    assert done.code == 0, done.stderr
    assert [(row["meta"], json.loads(row["deep"])) for row in done.rows] == [("{}", deep)] * 4
    assert [row["late"] for row in done.rows] == [{"a": None}, {"a": None}, {"a": 2}, {"a": 3}]


@pytest.mark.slow
def test_what_python_cannot_hold_passes_through_a_job(run: Run, tmp_path: Path) -> None:
    """Types and values that broke jobs: extension types, views, times beyond Python's, text that is not UTF-8."""
    not_utf8 = pa.array([b"how many", b"caf\xe9", b"pens"]).view(pa.string())
    columns = {
        "prompt": not_utf8,
        "note": not_utf8,
        "at": pa.array([2**62, 0, None]).view(pa.timestamp("us", "UTC")),
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
        "json": pa.array(['{"a": 1}', None, "2"], pa.json_()),
        "key": pa.array([bytes(range(16))] * 3, pa.uuid()),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (2,)), pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2))
        ),
        "view": pa.array(["x", None, "y"], pa.string_view()),
        "views": pa.array([["x"], None, []], pa.list_view(pa.string_view())),
    }
    done = run(parquet(tmp_path / "in.parquet", **columns))
    assert done.code == 0, done.stderr
    table = pa.parquet.read_table(done.folder / "data")
    kept = pa.array([True, False, True])
    for name in ("note", "at", "flag", "json", "key", "tensor"):
        assert table[name].combine_chunks().equals(columns[name].filter(kept)), name
    assert table["view"].to_pylist() == ["x", "y"]
    assert table["views"].to_pylist() == [["x"], []]
    (error,) = done.errors
    assert (error["error_type"], error["request_id"]) == ("BadPrompt", "in.parquet:2")
    assert json.loads(error["input"])["note"] == "caf\ufffd"


@pytest.mark.slow
def test_a_tool_call_changes_no_other_prompt(run: Run, model: Path, tmp_path: Path) -> None:
    """Each message is written as JSON by this template, arguments and all."""
    base = shutil.copytree(model, tmp_path / "model")
    (base / "chat_template.jinja").write_text("{% for message in messages %}{{ message | tojson }}{% endfor %}")
    calls = [{"city": "Paris", "days": 3}, {"unit": "C", "days": 2.5}]
    chats = [[{"role": "user", "content": "x", "tool_calls": [{"arguments": call}]}] for call in calls]
    together = run(write_jsonl(tmp_path / "in.jsonl", [{"messages": chat} for chat in chats]), base=base)
    assert together.code == 0, together.stderr
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [tokenizer.decode(row["prompt_token_ids"]) for row in together.rows]
    assert prompts == [json.dumps(chat[0], ensure_ascii=False) for chat in chats]
    assert [json.loads(row["messages"]) for row in together.rows] == chats


@pytest.mark.slow
def test_rows_of_megabytes_are_written_in_parts_of_their_own(run: Run, tmp_path: Path) -> None:
    """Parts close by bytes; a prompt of megabytes is refused, and images beside it pass through."""
    rows = [{"prompt": f"how many {n}", "image": chr(97 + n) * (13 << 20)} for n in range(4)]
    rows += [{"prompt": "how many " * (1 << 20)}]
    done = run(write_jsonl(tmp_path / "in.jsonl", rows))
    assert done.code == 0, done.stderr
    assert [len(part) for part in done.parts.values()] == [2, 2, 0]
    assert [row["image"] for row in done.rows] == [row["image"] for row in rows[:4]]
    assert [row["error_type"] for row in done.errors] == ["Refused"]
