"""The workers of the project's environment decode, and those of others import nothing of the project."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from benchmarks.peers.cells import without_end
from benchmarks.peers.contenders import PEERS, Contender, contenders
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.peers.workers.protocol import Settings, Work
from benchmarks.speed import prompts_of
from drafter.embedded import EMBEDDED_BASE
from drafter.text.tokenizers import load_tokenizer
from tests.support.paths import ROOT

OWN = [one for one in contenders(["transformers"], "ctc") if one.environment is None]
OTHERS = sorted({one.worker for some in PEERS.values() for one in some if one.environment is not None})


def decoded(contender: Contender, folder: Path, dtype: str) -> list[list[int]]:
    work = Work(prompts_of(load_tokenizer(EMBEDDED_BASE), "short", 2), 8)
    settings = Settings(str(EMBEDDED_BASE), dtype, contender.variant, 2, 300, [1], 1, str(folder))
    process = WorkerProcess(Path(sys.executable), f"benchmarks.peers.workers.{contender.worker}", settings)
    try:
        return [without_end(tokens, {1}) for tokens in process.decode(work).tokens]
    finally:
        process.close()


@pytest.mark.slow
def test_all_ways_of_the_projects_environment_agree(tmp_path: Path) -> None:
    found = {one.name: decoded(one, tmp_path, "float32") for one in OWN}
    assert list(found) == [
        "this engine, none",
        "this engine, ngram",
        "this engine, ctc",
        "this engine, auto",
        "transformers generate, plain",
    ]
    first = found["this engine, none"]
    assert [len(tokens) for tokens in first] == [8, 8]
    assert all(tokens == first for tokens in found.values())


@pytest.mark.parametrize("worker", [*OTHERS, "llama_gguf", "protocol"])
def test_a_peer_needs_nothing_of_the_project(worker: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / "peers" / "workers" / f"{worker}.py").read_text(encoding="utf-8"))
    imported = {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    imported |= {name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names}
    of_project = {one for one in imported if one.split(".")[0] in {"drafter", "pipeline", "jobs", "benchmarks"}}
    assert of_project <= {"benchmarks.peers.workers.protocol", "benchmarks.peers.workers.llama_gguf"}
