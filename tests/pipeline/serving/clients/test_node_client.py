"""OpenAI's own client for Node.js, unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from drafter import SpeculativeLM
from drafter.native.build import cache_folder
from tests.pipeline.serving.conftest import NAME
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("with_node.mjs")
PACKAGE = "openai@6.49.0"


def test_the_node_client(local: str, plain: SpeculativeLM) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node.js on this machine")
    folder = cache_folder() / "clients" / f"node-{PACKAGE}"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", PACKAGE]
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"{PACKAGE} cannot be installed here: {(installed.stderr or installed.stdout).strip()[-200:]}")
    script = shutil.copy(SCRIPT, folder)  # modules are looked for beside it
    found = subprocess.run([node, script, local, NAME], capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    wanted = plain.chat(["how many pens"], max_new_tokens=20)[0].text
    assert json.loads(found.stdout) == {"models": [NAME], "whole": wanted, "text": wanted, "status": 400}
