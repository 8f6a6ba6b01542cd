"""The documentation is true: its code runs as it stands, its tables name every module, its links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.heads.registry import HEADS
from drafter.requests import Request, SamplingParams
from drafter.target.model import BaseModel
from drafter.training.targets import RegeneratedText
from tests.support.models import random_prompts, run_engine
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "add-a-drafter.md"


def run_page(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the page's Python, block by block. A block that begins with a file's path becomes that module.

    Returns `names` with everything that the blocks defined.
    """
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        space = names
        if file := re.match(r"# (\S+)\.py\n", code):
            module = ModuleType(file[1].replace("/", "."))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            space = module.__dict__
        exec(compile(code, str(PAGE), "exec"), space)
        names.update((name, value) for name, value in space.items() if not name.startswith("__"))
    return names


def test_the_page_on_adding_a_drafter(
    tiny_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [Request(p, SamplingParams(max_new_tokens=20, ignore_eos=True)) for p in random_prompts(8)]
    plain = run_engine(tiny_base, PlainDecoding(), requests, slots=3, max_length=64)
    texts = [
        RegeneratedText([*r.prompt_ids, *one.token_ids], len(r.prompt_ids))
        for r, one in zip(requests, plain, strict=True)
    ]

    given = {"base": tiny_base, "texts": texts, "held_out": texts[:4], "folder": tmp_path / "head"}
    with patch.dict(TRAINING_FREE), patch.dict(HEADS):  # the page adds to them
        made = run_page(given, monkeypatch)
        drafters = {"mlp": made["drafter"], "echo": load_drafter("echo", tiny_base, 4)}

    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["step 30", "step 60"]
    for drafter in drafters.values():
        found = run_engine(tiny_base, drafter, requests, slots=3, max_length=64, nodes=4)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert sum(one.counts.num_draft_tokens for one in found) > 0
    found = run_engine(tiny_base, drafters["mlp"], requests, slots=3, max_length=64, nodes=16)
    steps = sum(one.counts.num_decode_steps for one in found)
    assert steps < 0.7 * sum(one.counts.num_decode_steps for one in plain)


@pytest.mark.parametrize("package", ["drafter", "pipeline"])
def test_every_room_has_its_line(package: str) -> None:
    """And every line its room: folders with code, and those with models."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split(f"## Rooms of `{package}/`")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE))
    rooms = {str(file.parent.relative_to(ROOT / package)) for file in (ROOT / package).rglob("__init__.py")}
    assert named == rooms - {"."}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link
