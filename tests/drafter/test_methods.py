"""Each method's folder can be deleted: what it adds is then unknown, and all else works as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drafter.plugins import methods
from tests.support.paths import ROOT

NEEDS = {"fly": {"ngram"}}
"""A long chain goes on with what n-grams say: that method is deleted with what it needs."""
WITHOUT = """
import os, shutil, sys
from pathlib import Path

import torch, transformers.conversion_mapping, transformers.modeling_utils  # once, for all children
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def without(removed, root):
    import importlib, pkgutil
    sys.path.insert(0, str(root))
    import drafter
    assert Path(drafter.__file__).is_relative_to(root), drafter.__file__
    for module in pkgutil.walk_packages(drafter.__path__, "drafter."):
        importlib.import_module(module.name)
    from drafter import plugins
    from drafter.drafters.registry import TRAINING_FREE
    from drafter.engine.config import EngineConfig
    from drafter.heads.checkpoint import HEADS
    from drafter.llm import SpeculativeLM

    assert not plugins.methods().keys() & set(removed)
    assert "ctc" in HEADS and "none" in TRAINING_FREE
    drafters = ("none", "auto" if {"cacheback", "memory"} & set(removed) else "ctc")
    said = {}
    for name in drafters:
        config = EngineConfig(max_num_seqs=2, max_model_len=64, num_draft_tokens=4)
        with SpeculativeLM.from_pretrained(drafter=name, config=config) as lm:
            said[name] = lm.generate(["Tom has 3 boxes", "One"], max_new_tokens=8)
    plain, drafted = said.values()
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert any(one.counts.num_draft_tokens for one in drafted)


source, folder = Path(sys.argv[1]), Path(sys.argv[2])
for names in sys.argv[3:]:
    root = folder / names
    shutil.copytree(source / "drafter", root / "drafter", ignore=shutil.ignore_patterns("__pycache__"))
    for name in names.split("+"):
        shutil.rmtree(root / "drafter" / "methods" / name)
    if not (child := os.fork()):
        without(names.split("+"), root)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"without {names} the rest does not work")
"""


@pytest.mark.parametrize(
    "first", [pytest.param(True, id="learning"), pytest.param(False, id="others", marks=pytest.mark.slow)]
)
def test_a_method_can_be_deleted(first: bool, tmp_path: Path) -> None:
    removed = [
        "+".join([method, *(name for name, needed in NEEDS.items() if method in needed)])
        for method in sorted(methods())
        if (method == "learning") == first
    ]
    command = [sys.executable, "-c", WITHOUT, str(ROOT), str(tmp_path), *removed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
