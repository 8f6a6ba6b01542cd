"""One Ray, one tiny model, and a way to run the job and read what it wrote."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafter import EngineConfig, SpeculativeLM
from jobs.generate import main
from tests.support.images import model_of, processor_of
from tests.support.prepared_workers import PreparedWorkers, prepared_workers
from tests.support.waiting import wait_until

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[PreparedWorkers]:
    """The one Ray cluster of a pytest process, and its workers: all jobs that tests run in this process use it."""
    os.environ["RAY_ADDRESS"] = "local"  # never somebody else's cluster
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - tests wait for their workers
    # Ray looks for new files of its logs ten times a second, of which there are hundreds in the end, and at all its
    # processes' memory every five seconds. Nobody reads either here.
    os.environ |= {"RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0", "LOG_NAME_UPDATE_INTERVAL_S": "10"}
    os.environ["REPORTER_UPDATE_INTERVAL_MS"] = "60000"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # how often Ray Train looks for workers that have ended
    # A task's process stays for the next test: Ray would end all but two of them after a second, and each has spent
    # seconds on its imports.
    idle = {"num_workers_soft_limit": 8, "idle_worker_killing_time_threshold_ms": 3_600_000}
    with prepared_workers() as workers:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", workers.python)
            start_ray({"metrics_report_interval_ms": 3000, **idle})
        yield workers
        ray.shutdown()
    del os.environ["RAY_ADDRESS"]


def start_ray(system_config: dict[str, Any]) -> None:
    """Start Ray. It gives its own processes half a minute, which is too little on a very busy machine: try again.

    More time would not help: its raylet ends when an agent has not come up after fifteen seconds.
    """
    for tries_left in reversed(range(5)):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _system_config=system_config,
            )
        except Exception:  # Ray raises bare ones
            if not tries_left:
                raise
        else:
            return


Driver = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def driver(local_ray: PreparedWorkers) -> Driver:
    """Run a command of ours in a process of its own that joins `local_ray`: `driver("jobs.generate", "--input", …)`.

    It is killed when the context ends, and its actors have ended then.
    """

    @contextmanager
    def run_driver(module: str, *arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        with subprocess.Popen(command, env=environment, text=True, **options) as job:
            try:
                yield job
            finally:
                job.kill()
                job.wait()
                wait_until(actors_have_ended, "what the job has left behind ends", pause=0.2)

    def actors_have_ended() -> bool:
        free = ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
        return free and not local_ray.named("Engine", "RayTrainWorker")

    return run_driver


@pytest.fixture(autouse=True)
def free_actors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A job that failed leaves its actors to the garbage collector, and the next test needs their CPUs."""
    yield
    # A collection takes half a second, more than most tests.
    if "local_ray" in request.fixturenames and ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        gc.collect()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with a byte-level BPE tokeniser and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["how many apples and pens does she have"] * 20, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[SpeculativeLM]:
    """The model without a drafter: what every answer and every row must equal."""
    with SpeculativeLM.from_pretrained(model, "none", config=EngineConfig(max_num_seqs=4)) as lm:
        yield lm


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random LLaVA with its processor."""
    folder = tmp_path_factory.mktemp("seeing")
    model_of("llava").save_pretrained(folder)
    processor_of("llava").processor.save_pretrained(folder)
    return folder


@dataclass
class JobRun:
    """What any job left behind.

    Args:
        code: Its exit code.
        stdout: What it printed there.
        stderr: What it printed there.
        folder: Its output.
    """

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def error(self) -> str:
        """The last line for the person, which is one line."""
        return self.stderr.rstrip("\n").rpartition("\n")[2]


@dataclass
class Outcome(JobRun):
    """What a generation job left behind."""

    @property
    def parts(self) -> dict[str, list[dict[str, Any]]]:
        """Finished rows by file, in order."""
        return {path.name: read_rows(path) for path in sorted((self.folder / "data").iterdir())}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Finished rows in order of the files."""
        return [row for rows in self.parts.values() for row in rows]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Rows that could not be generated."""
        return [row for path in sorted((self.folder / "errors").iterdir()) for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A Parquet file's rows."""
    rows: list[dict[str, Any]] = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    return rows


TIMING_COLUMNS = ("generation_seconds", "finished_at", "num_cached_tokens", "drafter", "drafter_version")
"""Columns that differ when a row is generated again."""


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in a row that is made again."""
    return {name: value for name, value in row.items() if name not in TIMING_COLUMNS}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; text and bytes are written as they are."""
    with path.open("wb") as file:
        for row in rows:
            line = row if isinstance(row, str | bytes) else json.dumps(row)
            file.write((line if isinstance(line, bytes) else line.encode()) + b"\n")
    return path


Run = Callable[..., Outcome]


def job_arguments(source: Any, folder: Path, model: Any, *settings: Any, drafter: str = "ngram") -> list[str]:
    """A command line of the generation job; what is said twice is as `settings` say it."""
    arguments = ["--input", source, "--output", folder, "--model", model, "--drafter", drafter]
    arguments += ["--sampling.max_new_tokens", 12, "--resources.cpus_per_actor", 1, "--engine.max_num_seqs", 4]
    # A second engine would have loaded when the few rows are done, and slow down the first meanwhile.
    arguments += ["--resources.max_actors", 1]
    # A fixed budget makes even the statistics repeatable, and the engine need not measure the machine at its start.
    arguments += ["--engine.num_draft_tokens", 3]
    return [str(argument) for argument in [*arguments, *settings]]


@pytest.fixture
def run(local_ray: None, submit: Run) -> Run:
    """Run the job in this process: `run(input, "--sampling.top_k", 5, output=…)`."""
    return submit


@pytest.fixture
def refused(submit: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run what is refused before Ray is asked for."""

    def connect() -> None:
        raise AssertionError("the job begins")

    monkeypatch.setattr("pipeline.generate.job.connect", connect)
    return submit


@pytest.fixture
def submit(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """What both do."""

    def job(
        source: Any, *settings: Any, output: Path | None = None, base: Any = None, drafter: str = "ngram"
    ) -> Outcome:
        folder = output or tmp_path / "out"
        capfd.readouterr()
        code = main(job_arguments(source, folder, base or model, *settings, drafter=drafter))
        printed = capfd.readouterr()
        return Outcome(code, printed.out, printed.err, folder)

    return job


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & 'quoted' \"doubly\" {{ 7 * 7 }} \u202e"
"""Text that a page must not take for its own."""
JOB_ROWS: list[Any] = [
    *({"prompt": f"how many apples {n}", "category": "<b>fruit</b>" if n % 2 else None} for n in range(6)),
    {"prompt": HOSTILE, "category": HOSTILE},
    {"prompt": "", "category": "x"},
    HOSTILE,
]
"""Input of `finished_job`: seven rows to generate and two errors."""
JOB_SETTINGS = ("--sampling.temperature", 0.3, "--sampling.max_new_tokens", 40)
"""What decides about the rows of `finished_job`, apart from `run`'s own settings."""


@dataclass
class FinishedJob:
    """A job that has come to its end.

    Args:
        source: Its input, of `JOB_ROWS`.
        outcome: What it left behind.
    """

    source: Path
    outcome: Outcome

    def reopen(self) -> None:
        """Have the job go on, as after a driver that died: what is missing in the output is to be made again."""
        file = self.outcome.folder / "run.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "state": "running"}))
        (self.outcome.folder / "_temporary").mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def finished_job(local_ray: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A job of five parts, for all tests that only need an output. They must leave it as it is: see `finished`."""
    folder = tmp_path_factory.mktemp("finished")
    source = write_jsonl(folder / "in<i>.jsonl", JOB_ROWS)
    code = main(job_arguments(source, folder / "out", model, *JOB_SETTINGS, "--writing.rows_per_file", 2))
    assert code == 0
    return FinishedJob(source, Outcome(code, "", "", folder / "out"))


@pytest.fixture
def finished(finished_job: FinishedJob, tmp_path: Path) -> FinishedJob:
    """A copy of `finished_job` where `run` has its output: the test may do with it what it likes."""
    source = Path(shutil.copy(finished_job.source, tmp_path))
    folder = shutil.copytree(finished_job.outcome.folder, tmp_path / "out")
    return FinishedJob(source, replace(finished_job.outcome, folder=folder))
