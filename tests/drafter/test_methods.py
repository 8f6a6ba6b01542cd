"""Each method's folder can be deleted: what it adds is then unknown, in jobs too, and all else works as before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.plugins import methods
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
PACKAGES = ("drafter", "pipeline", "jobs")
WITHOUT = (
    f"""
PACKAGES = {PACKAGES}
"""
    + """
import json, os, shutil, sys
from pathlib import Path

import torch, transformers.conversion_mapping, transformers.modeling_utils  # once, for all children
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def without(removed, added, root):
    import importlib, pkgutil
    sys.path.insert(0, str(root))
    import drafter
    assert Path(drafter.__file__).is_relative_to(root), drafter.__file__
    for module in pkgutil.walk_packages(drafter.__path__, "drafter."):
        if module.name != "drafter.acceptance.triton_choice":  # it wants Triton, as PyTorch for GPUs does
            importlib.import_module(module.name)
    from drafter import plugins
    from drafter.drafters.registry import TRAINING_FREE
    from drafter.engine.config import EngineConfig
    from drafter.heads.checkpoint import HEADS
    from drafter.llm import SpeculativeLM

    assert removed not in plugins.methods()
    assert "ctc" in HEADS and "none" in TRAINING_FREE
    drafters = ("none", "auto" if removed in ("cacheback", "memory") else "ctc")
    said = {}
    for name in drafters:
        config = EngineConfig(max_num_seqs=2, max_model_len=64, num_draft_tokens=4)
        with SpeculativeLM.from_pretrained(drafter=name, config=config) as lm:
            said[name] = lm.generate(["Tom has 3 boxes", "One"], max_new_tokens=8)
    plain, drafted = said.values()
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert any(one.counts.num_draft_tokens for one in drafted)
    from jobs.generate import main

    prompts = root / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "One", "id": "a"}))
    job = ["--input", str(prompts), "--output", str(root / "out"), "--dry_run"]
    assert main(job) == 0
    assert all(main([*job, f"--{setting}", name]) == 2 for setting, name in added)


source, folder = Path(sys.argv[1]), Path(sys.argv[2])
for name, added in json.loads(sys.argv[3]).items():
    root = folder / name
    for package in PACKAGES:
        shutil.copytree(source / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(root / "drafter" / "methods" / name)
    if not (child := os.fork()):
        without(name, added, root)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"without {name} the rest does not work")
"""
)


@pytest.mark.parametrize("first", [pytest.param(True, id="learning"), pytest.param(False, id="others")])
def test_a_method_can_be_deleted(first: bool, tmp_path: Path) -> None:
    added = {
        name: [*(("drafter", one) for one in method.drafters), *(("verifier", one) for one in method.verifiers)]
        for name, method in sorted(methods().items())
        if (name == "learning") == first
    }
    command = [sys.executable, "-c", WITHOUT, str(ROOT), str(tmp_path), json.dumps(added)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_a_job_runs_without_a_method(tmp_path: Path) -> None:
    """Without one that `auto` has here."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "drafter" / "methods" / "cacheback")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Tom has 3 boxes", "id": "a"}))
    command = [sys.executable, "-m", "jobs.generate", "--input=in.jsonl", "--output=out", "--sampling.max_new_tokens=8"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out" / "data").glob("*.parquet"))) == 1
