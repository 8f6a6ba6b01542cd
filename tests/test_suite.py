"""Tests of the tests: none depends on how fast the machine happens to be.

Where the number of draft tokens is `auto`, what is drafted follows from latencies. In the tests' own process these are
given (`tests.support.latencies`). Elsewhere, in a job's processes or in a test that is marked as `measuring`, they are
measured, and no test asserts anything about drafts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.target_model.model import BaseModel
from tests.conftest import SHARED_FIXTURES
from tests.support.latencies import TimelessBudget
from tests.support.models import AdversarialDrafter, SpellingTokenizer
from tests.support.paths import ROOT

_OF_OTHER_PROCESSES = {"run", *SHARED_FIXTURES}
"""Fixtures whose engines run in processes of their own."""
_AUTO = re.compile(r"num_draft_tokens\W+auto\b")
_ABOUT_DRAFTS = re.compile(
    r"num_draft_tokens|num_accepted_draft_tokens|num_spec_steps|acceptance_histogram|per_step_accepted|acceptance_length"
)


def offences(text: str) -> Iterator[str]:
    """Yield the tests of a module that assert something about drafts which follow from measured latencies."""
    tree = ast.parse(text)
    constants = {
        name.id: ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            source = "\n".join([*(constants[name] for name in sorted(names & constants.keys())), ast.unparse(node)])
            asserted = "\n".join(ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Assert))
            elsewhere = _AUTO.search(source) and _OF_OTHER_PROCESSES & {one.arg for one in node.args.args}
            measuring = any("mark.measuring" in ast.unparse(one) for one in node.decorator_list)
            if (elsewhere or measuring) and _ABOUT_DRAFTS.search(asserted):
                yield node.name


def test_nothing_is_asserted_of_drafts_that_follow_from_the_clock() -> None:
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    assert len(files) > 100
    assert {str(file): found for file in files if (found := list(offences(file.read_text(encoding="utf-8"))))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "AUTO = ['--engine.num_draft_tokens', 'auto']\ndef test_a(run):\n    assert run(*AUTO).num_draft_tokens",
            ["test_a"],
        ),
        ("@pytest.mark.measuring\ndef test_a():\n    assert generate().mean_acceptance_length > 1", ["test_a"]),
        ("def test_a(run):\n    assert run('--engine.num_draft_tokens', 3).num_draft_tokens", []),
        ("@pytest.mark.measuring\ndef test_a():\n    assert generate().tokens", []),
    ],
)
def test_the_rule_finds_what_breaks_it(text: str, found: list[str]) -> None:
    assert list(offences(text)) == found


def test_engines_of_this_process_are_given_their_latencies(tiny_base: BaseModel) -> None:
    config = EngineConfig(max_num_seqs=5, num_draft_tokens="auto", max_model_len=32)
    budget = Engine(tiny_base, AdversarialDrafter(0, nodes=6), SpellingTokenizer(), config).budget
    assert isinstance(budget, TimelessBudget)
    assert budget.table.batches.tolist() == [1, 4, 5]
    assert budget.table.verify[0, 0] == 1.1
