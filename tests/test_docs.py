"""The documentation is true: its code runs as it stands, its tables name every module, its links lead somewhere."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.heads.checkpoint import HEADS, new_head, save_head
from drafter.heads.contract import Provenance
from drafter.plugins import methods, resolved
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.training.loop import TorchOptimiser, TrainingStep, train
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, draft_batch, simulated_beta
from examples.notebook import run
from tests.support.models import random_prompts, run_engine
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "add-a-drafter.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's package, installed: its modules and its entry point are on the path."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(python\n# \S+|toml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    group, entry = blocks.pop("toml").strip().splitlines()
    for name, code in blocks.items():
        file = tmp_path / name.partition("# ")[2]
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, encoding="utf-8")
    metadata = tmp_path / "drafter_example-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: drafter-example\nVersion: 1\n", encoding="utf-8")
    assert group == '[project.entry-points."drafter.methods"]'
    (metadata / "entry_points.txt").write_text(f"[drafter.methods]\n{entry.replace(chr(34), '')}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    methods.cache_clear()
    with patch.dict(TRAINING_FREE, resolved("drafters")), patch.dict(HEADS, resolved("heads")), patch.dict(sys.modules):
        yield
    methods.cache_clear()


@pytest.mark.usefixtures("example")
def test_the_page_on_adding_a_drafter(tiny_base: BaseModel, tmp_path: Path) -> None:
    requests = [Request(p, SamplingParams(max_new_tokens=20, ignore_eos=True)) for p in random_prompts(8)]
    plain = run_engine(tiny_base, PlainDecoding(), requests, max_num_seqs=3, max_model_len=64)
    texts = [
        RegeneratedText([*r.prompt_ids, *one.token_ids], len(r.prompt_ids))
        for r, one in zip(requests, plain, strict=True)
    ]

    settings = TrainingSettings(steps=60, learning_rate=0.01, warmup_steps=5)
    head = new_head("example", tiny_base, {})
    optimiser = TorchOptimiser(TrainingStep(tiny_base, head, settings), settings)
    batch = draft_batch(texts, 4, settings.anchors_per_text).to(tiny_base.device)
    for _ in train(optimiser, itertools.repeat([batch]), settings, lambda: simulated_beta(head, tiny_base, texts[:4])):
        pass
    head.provenance = Provenance(tiny_base.name, tiny_base.fingerprint, {"steps": settings.steps})
    save_head(head, tmp_path / "head")

    for name, nodes in (("frequent", 4), (tmp_path / "head", 16)):
        drafter = load_drafter(name, tiny_base, nodes)
        found = run_engine(tiny_base, drafter, requests, max_num_seqs=3, max_model_len=64, num_draft_tokens=nodes)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert sum(one.counts.num_draft_tokens for one in found) > 0
    steps = sum(one.counts.num_decode_steps for one in found)
    assert steps < 0.7 * sum(one.counts.num_decode_steps for one in plain)


@pytest.mark.parametrize(("page", "least"), [("docs/python.md", 6), ("docs/records.md", 3)])
def test_the_code_of_a_page_runs_block_after_block(page: str, least: int) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    try:
        for block in blocks:
            exec(compile(block, page, "exec", dont_inherit=True), names)
    finally:
        if "lm" in names:
            names["lm"].close()
    assert len(blocks) >= least


def test_the_notebook_has_the_outputs_of_its_code() -> None:
    """`python -m examples.notebook` writes them; tables as HTML are left to it."""
    notebook = json.loads((ROOT / "examples" / "answers.ipynb").read_text(encoding="utf-8"))

    def shown(cells: list[Any]) -> list[Any]:
        return [one["data"]["text/plain"] for cell in cells for one in cell.get("outputs", ()) if "data" in one]

    assert shown(run(notebook)["cells"]) == shown(notebook["cells"])
    assert len(shown(notebook["cells"])) == 3


@pytest.mark.parametrize("package", ["drafter", "pipeline"])
def test_every_room_has_its_line(package: str) -> None:
    """And every line its room: folders with code, and those with models."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split(f"## Rooms of `{package}/`")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE))
    rooms = {str(file.parent.relative_to(ROOT / package)) for file in (ROOT / package).rglob("__init__.py")}
    assert named == rooms - {"."}


def anchors(page: Path) -> set[str]:
    """What links to a page may name behind `#`: its headings, as GitHub spells them, and its own marks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\]\([^)]*\)", "", one) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    marks = re.findall(r'<a id="([^"]+)"', text)
    return {*marks, *(re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings)}


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert "://" in link or there.exists(), link
        assert not anchor or "://" in link or anchor in anchors(there), link
