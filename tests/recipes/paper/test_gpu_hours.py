"""GPU hours by formula: against figures worked out by hand, and the committed page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.heads.checkpoint import new_head
from drafter.target_model.model import BaseModel
from recipes.paper.gpu_hours import estimate, estimates_page, head_parameters
from recipes.paper.head_settings import head_settings
from recipes.paper.paper_config import HERE, parse_config
from tests.support.models import random_model

TINY = ["--config", str(HERE / "tiny.yaml"), "--output", "nowhere"]
HARDWARE = ["--hardware", "{gpu: made up, teraflops: 1.0e-6, gigabytes_per_second: 1.0e-3, arithmetic_share: 0.5, "
            "bandwidth_share: 0.5, measured_prompts: 7, prompt_tokens: 10, question_tokens: 6, answer_tokens: 20, "
            "useful_share: 0.5}"]  # fmt: skip


def test_estimates_by_hand() -> None:
    # Of a layer 4 · 64² of attention and 3 · 64 · 172 of the MLP; four layers, and the LM head of 2,048 tokens.
    weights = 4 * (4 * 64**2 + 3 * 64 * 172) + 2048 * 64
    operations, bandwidth = 0.5e6, 0.5e6
    kv = 2 * 4 * 64 * 2  # bytes of keys and values of a position
    found = {one.stage: one.hours * 3600 for one in estimate(parse_config([*TINY, *HARDWARE], "", ""))}

    def step(rows: int, length: float) -> float:
        return max((2 * weights + rows * length * kv) / bandwidth, 2 * weights * rows / operations)

    def texts(count: int, prompt: int, tokens: int, rows: int) -> float:
        return 2 * weights * count * prompt / operations + count * tokens / rows * step(rows, prompt + tokens / 2)

    # At eight rows arithmetic takes longer than reading the weights; alone, reading does.
    assert step(8, 3) == 2 * weights * 8 / operations
    assert step(1, 14) == (2 * weights + 14 * kv) / bandwidth
    assert found["questions"] == pytest.approx(texts(8, 0, 6, 8))
    assert found["answers"] == pytest.approx(texts(4 + 24, 10, 20, 8))
    arms = 10 + 1
    assert found["evaluate"] == pytest.approx(arms * texts(7, 10, 8, 1))
    tokens, positions = 12 * 4 * 30, 12 * 4 * 8 * 4
    medusa = 4 * (64 * 64 + 64) + 4 * 2048 * 64
    trained = 2 * weights * tokens + 6 * medusa * (tokens + positions) + 4 * 2048 * 64 * positions
    assert found["train-medusa"] == pytest.approx(trained / operations)


def test_parameters_are_those_of_the_head_that_is_trained() -> None:
    config = parse_config([*TINY, "--base.layers", "3", "--base.width", "32", "--base.vocabulary", "97"], "", "")
    base = BaseModel(random_model("llama"))
    for name in config.heads:
        algorithm, fields = head_settings(config, name)
        head = new_head(algorithm, base, fields, torch.ones(97))
        assert head_parameters(config, name) == sum(one.numel() for one in head.parameters()), name


def test_the_committed_page_is_what_the_command_writes() -> None:
    assert (HERE / "estimates.md").read_text(encoding="utf-8") == estimates_page()
    readme = Path(HERE / "README.md").read_text(encoding="utf-8")
    assert "estimates.md" in readme
