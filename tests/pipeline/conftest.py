"""One Ray, one tiny model, and a way to run the job and read what it wrote."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.generate.generate_job import main
from pipeline.output.output_columns import TIMING_COLUMNS

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="package")  # after these tests its two dozen processes would only take time from the others
def local_ray() -> Iterator[None]:
    os.environ["RAY_ADDRESS"] = "local"  # never somebody else's cluster
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - tests wait for their workers
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # how often Ray Train looks for workers that have ended
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 3000},
    )
    yield
    ray.shutdown()
    del os.environ["RAY_ADDRESS"]


@pytest.fixture(autouse=True)
def free_actors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A job that failed leaves its actors to the garbage collector, and the next test needs their CPUs."""
    yield
    if "local_ray" in request.fixturenames:  # a collection takes half a second, more than most of the other tests
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


@pytest.fixture
def run(local_ray: None, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the job in this process: `run(input, "--sampling.top_k", 5, output=…)`."""

    def job(
        source: Any, *settings: Any, output: Path | None = None, base: Any = None, drafter: str = "ngram"
    ) -> Outcome:
        folder = output or tmp_path / "out"
        arguments = ["--input", source, "--output", folder, "--model", base or model, "--drafter", drafter]
        arguments += ["--sampling.max_new_tokens", 12, "--resources.cpus_per_actor", 1, "--engine.slots", 4]
        # A second engine would have loaded when the few rows are done, and slow down the first meanwhile.
        arguments += ["--resources.max_actors", 1]
        capfd.readouterr()
        code = main([str(argument) for argument in [*arguments, *settings]])
        printed = capfd.readouterr()
        return Outcome(code, printed.out, printed.err, folder)

    return job
