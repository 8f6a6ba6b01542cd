"""Models by name: what tells one from another."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engines.models import head_fingerprints, model_fingerprint
from pipeline.errors import InputError
from tests.pipeline.conftest import JOB_SETTINGS, FinishedJob, Run
from tests.support.paths import ROOT

COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, with two commits of one repository; the hub itself cannot be asked."""
    for commit in COMMITS:
        folder = tmp_path / "models--somebody--tiny" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--somebody--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMITS[0])
    return refs


def test_a_hub_id_stands_for_its_commit(cache: Path) -> None:
    assert model_fingerprint("somebody/tiny") == f"somebody/tiny@{COMMITS[0]}"
    assert head_fingerprints(None, "somebody/tiny+ngram") == {"somebody/tiny": f"somebody/tiny@{COMMITS[0]}"}
    (cache / "main").write_text(COMMITS[1])
    assert model_fingerprint("somebody/tiny") == f"somebody/tiny@{COMMITS[1]}"


def test_draft_models_are_told_apart_wherever_they_are_named(cache: Path) -> None:
    found = head_fingerprints(None, "ngram+stack:cacheback>model:somebody/tiny@cpu")
    assert found == {"model:somebody/tiny@cpu": f"somebody/tiny@{COMMITS[0]}"}
    with pytest.raises(InputError, match="nobody/none"):
        head_fingerprints(None, "stack:ngram>model:nobody/none")


def test_a_hub_id_that_cannot_be_found_is_named(cache: Path) -> None:
    with pytest.raises(InputError, match="model nobody/none is no folder, and as a hub id: "):
        model_fingerprint("nobody/none")
    with pytest.raises(InputError, match="drafter nobody/none is no folder, and as a hub id: "):
        head_fingerprints(None, "nobody/none")


@pytest.mark.parametrize("job", ["generate", "serve"])
def test_without_a_network_a_bare_name_fails_at_once(job: str, tmp_path: Path) -> None:
    """The hub's client alone asks a hub that does not answer again and again, for half a minute."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", f"{tmp_path}/prompts.jsonl", "--output", f"{tmp_path}/out"] if job == "generate" else []
    code = f"""
import sys, time
from huggingface_hub import file_download
from jobs.{job} import main
time.sleep = lambda seconds: sys.exit(f"it waits {{seconds}} seconds to ask again")
sys.exit(main({[*files, "--model", "tiny-model"]}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: model tiny-model is no folder, and as a hub id: it is not in the cache {tmp_path}/hub, and the hub "
        f"{address} does not answer (give a folder, or a hub id that this machine can reach or has in its cache)"
    )


def test_a_slip_in_a_drafters_name_is_found_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match=r"no drafter 'ngarm': did you mean ngram\?"):
        head_fingerprints(None, "ctc+ngarm")


def test_an_early_exit_names_no_file() -> None:
    assert head_fingerprints(None, "exit:2") == {}
    assert list(head_fingerprints(None, "exit:2+ctc")) == ["ctc"]


@pytest.mark.slow
def test_an_output_is_not_gone_on_with_by_a_base_with_a_merged_adapter(
    run: Run, finished: FinishedJob, model: Path, tmp_path: Path
) -> None:
    merged = Path(shutil.copytree(model, tmp_path / "merged"))
    finished.reopen()
    assert run(finished.source, *JOB_SETTINGS, base=merged).code == 0  # a copy is the same model
    weights = load_file(merged / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if "proj" in name:
            weight += 0.02 * torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1])
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    finished.reopen()
    refused = run(finished.source, *JOB_SETTINGS, base=merged)
    assert refused.code == 2
    assert "belongs to another job (model was 'v2-" in refused.error
