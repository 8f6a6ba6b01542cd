"""Clients that people point at an endpoint, unchanged, each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter import EngineConfig, SpeculativeLM
from drafter.native.build import cache_folder
from pipeline.batches.config import BatchesConfig
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.calling import with_tools
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

HERE = Path(__file__).parent
PROMPT = "how many pens"
PACKAGES = {
    "litellm": ["litellm==1.110.2"],
    "langchain": ["langchain-openai==1.7.4"],
    "instructor": ["instructor==1.17.0"],
    "distilabel": ["distilabel[openai]==1.5.3", "requests"],
    "lmeval": ["lm-eval[api]==0.4.13", "transformers"],
}
RECORDS = [{"number": number, "exact": exact} for number in ("one", "two", "many") for exact in (True, False)]
"""What clients may get for a `Count`."""
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}

pytestmark = pytest.mark.slow


def environment(name: str) -> Path:
    """Return the interpreter of an environment with a client's packages, which is made once on a machine."""
    python = cache_folder() / "clients" / "-".join(PACKAGES[name]) / "bin" / "python"
    done = python.parent / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", python.parents[1]], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES[name]]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"{name} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
        done.touch()
    return python


@pytest.fixture(scope="module")
def calling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a model that calls tools, which its template shows."""
    folder = with_tools(model, tmp_path_factory.mktemp("calling"), tokens=True, shown=True)
    with (
        SpeculativeLM.from_pretrained(folder, "ngram", config=EngineConfig(max_num_seqs=4, num_draft_tokens=8)) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        yield address


@pytest.fixture
def run(local: str, calling: str, model: Path, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Run a client's script; return the JSON that it prints."""
    name = request.param
    return printed_by(environment(name), f"with_{name}.py", [local, NAME, PROMPT, str(model), calling], tmp_path)


def printed_by(python: Path, script: str, arguments: list[str], home: Path) -> dict[str, Any]:
    command = [str(python), str(HERE / script), *arguments]
    settings = QUIET | {"HOME": str(home)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=settings, cwd=home)
    assert found.returncode == 0, found.stderr
    printed: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def chat(plain: SpeculativeLM) -> str:
    """Plain decoding's answer."""
    return plain.chat([PROMPT], max_new_tokens=20)[0].text


@pytest.fixture(scope="module")
def text(plain: SpeculativeLM) -> str:
    """Plain decoding's continuation of the prompt."""
    return plain.generate([PROMPT], max_new_tokens=20)[0].text


@pytest.mark.parametrize("run", ["litellm"], indirect=True)
def test_litellm(run: dict[str, Any], chat: str, text: str) -> None:
    assert (run["chat"], run["text"]) == ([chat, chat], text)
    assert "shorten the prompt" in run["error"]


def test_litellm_runs_batches(model: Path, chat: str, tmp_path: Path) -> None:
    batches = BatchesConfig(str(tmp_path / "batches"))
    with (
        SpeculativeLM.from_pretrained(model, "ngram", config=EngineConfig(max_num_seqs=4, num_draft_tokens=8)) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}, batches=batches) as address,
    ):
        arguments = [address, NAME, PROMPT]
        found = printed_by(environment("litellm"), "with_litellm_batches.py", arguments, tmp_path)
    assert found == {"status": "completed", "chat": [chat] * 3, "listed": 1}


@pytest.mark.parametrize("run", ["langchain"], indirect=True)
def test_langchain(run: dict[str, Any], chat: str, text: str) -> None:
    assert (run["chat"], run["text"]) == ([chat] * 4, text)
    assert all(record in RECORDS for record in run["records"])
    assert run["called"] == run["streamed"]
    assert run["called"][0]["name"] == "Count"
    assert run["called"][0]["args"] in RECORDS


@pytest.mark.parametrize("run", ["instructor"], indirect=True)
def test_instructor(run: dict[str, Any], chat: str) -> None:
    assert run["chat"] == [chat]
    assert len(run["records"]) == 3
    assert all(record in RECORDS for record in run["records"])


@pytest.mark.parametrize("run", ["distilabel"], indirect=True)
def test_distilabel(run: dict[str, Any], chat: str) -> None:
    assert run["chat"] == [chat, chat]


@pytest.mark.parametrize("run", ["lmeval"], indirect=True)
def test_lm_eval(run: dict[str, Any], chat: str, plain: SpeculativeLM) -> None:
    assert run["chat"] == [chat]
    encode = partial(plain.tokenizer.encode, add_special_tokens=False)  # as lm-eval does
    context = encode(PROMPT)
    for answer, (found, is_greedy) in zip([" red and blue", " nothing at all"], run["loglikelihoods"], strict=True):
        ids = encode(PROMPT + answer)
        with torch.no_grad():
            rows = plain.base.model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        wanted = [float(row[token]) for row, token in zip(rows, ids[len(context) :], strict=True)]
        assert found == pytest.approx(sum(wanted), abs=1e-4)
        assert is_greedy == str(rows.argmax(-1).tolist() == ids[len(context) :])
