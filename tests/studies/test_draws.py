"""The benchmark of draws: what it reads and counts, on a small base and on logits that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.evaluation.results import write_json
from drafter.target_model.model import BaseModel
from drafter.training.targets import RegeneratedText
from studies.draws import ALONE, DRAWS_FILE, EXACT, READINGS, Changed, Reading, changed, costs, read, write_table
from tests.support.models import random_prompts


def test_all_readings_are_of_the_same_places(tiny_base: BaseModel) -> None:
    texts = [RegeneratedText(text, 3) for text in random_prompts(20, seed=2) if len(text) > 3]
    expected = read(tiny_base, texts, EXACT)
    assert len(expected) == sum(len(text.tokens) - 3 for text in texts) > 20
    for rows, nodes in ((1, 8), (16, 1), (2, 3)):
        found = read(tiny_base, texts, Reading("", torch.float32, rows, nodes))
        assert torch.allclose(found, expected, atol=1e-4)


def test_only_logits_that_differ_make_draws_differ() -> None:
    exact = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 2
    logits = {one: exact if one is EXACT else exact.bfloat16() for one in READINGS}
    found = list(changed(logits, 30))
    assert len(found) == 6
    for one in found:
        assert one.draws == 1500
        if EXACT.name in (one.reading, one.beside):
            assert 0 < one.distance < 0.02
            assert 0 < one.keyed < one.inverse
        else:
            assert (one.distance, one.keyed, one.inverse) == (0, 0, 0)
    # Everything differs where the distributions have nothing in common.
    apart = torch.full((50, 40), -1e4)
    apart[:, 0] = 0
    for one in changed({**logits, ALONE: apart, EXACT: apart.roll(1, 1)}, 2):
        if one.reading == ALONE.name:
            assert one.distance == pytest.approx(1)
            assert (one.keyed, one.inverse) == (100, 100)


def test_the_table(tmp_path: Path) -> None:
    environment: dict[str, Any] = {
        "command": "python -m …", "commit": "abc", "threads": 2, "base": {"parameters": 1000},
        "hardware": {"processor": "a processor", "cores": 2, "gpu": None},
    }  # fmt: skip
    record = {
        "environment": environment,
        "tokens": 25,
        "changed": [vars(Changed("bf16, alone", "fp32, alone", 0.7, 1000, 0.0125, 20, 100))],
        "costs": [vars(one) for one in costs(torch.zeros(64, 30))],
    }
    write_json(tmp_path / DRAWS_FILE, record)
    lines = write_table(tmp_path).splitlines()
    assert "| 0.7 | bf16, alone – fp32, alone | 1.25% | 2.00% | 10.00% |" in lines
    assert [line.split(" | ")[:2] for line in lines if line.startswith("| 30 |")] == [
        ["| 30", rows] for rows in ("1", "4", "17", "64")
    ]
