""""""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from drafter import SpeculativeLM
from tests.pipeline.serving.conftest import NAME
from tests.support.waiting import PATIENCE

SCRIPT = Path(__file__).with_name("client.mjs")


def test_the_node_client(local: str, plain: SpeculativeLM) -> None:
    """`npm install openai` in the project's folder, or in one above it, makes this run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js on this machine")
    if not any((folder / "node_modules" / "openai").is_dir() for folder in SCRIPT.parents):
        pytest.skip("the package openai is not installed for Node.js: npm install openai")
    found = subprocess.run([node, SCRIPT, local, NAME], capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    wanted = plain.generate([{"role": "user", "content": "how many pens"}], max_new_tokens=20)[0].text
    assert json.loads(found.stdout) == {"models": [NAME], "whole": wanted, "text": wanted, "status": 400}
