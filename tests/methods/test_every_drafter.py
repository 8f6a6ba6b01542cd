"""What the core's tests prove of its own drafters holds with each method's: the tokens are those of plain decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from drafter.drafters.contract import Drafter
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.errors import LoadError
from drafter.heads.checkpoint import new_head
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.cacheback.frozen_table import FrozenTable
from drafter.methods.draft_models.drafter import StackedDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.target_model.model import BaseModel
from recipes.cacheback.counting import NgramCounts
from tests.drafter.engine.test_not_finite import check_innocent_rows, device
from tests.support.heads import COUNTS, make_head
from tests.support.hybrids import hybrid_base
from tests.support.identity import SITUATIONS, MakeDrafter, check_identity
from tests.support.images import seeing_base
from tests.support.marks import pairwise
from tests.support.models import base_of

__all__ = ["device"]  # a fixture


def table_of(texts: list[list[int]]) -> FrozenTable:
    counts = NgramCounts(1000)
    for text in texts:
        counts.add(text)
    return counts.table(leaders=50, followers=4)


def imitation(base: BaseModel) -> Drafter:
    torch.manual_seed(0)
    head = new_head("imitation", base, {"layers": 2, "draft_vocab_size": 90}, COUNTS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False).drafter(base, 8)


def draft_model_of(base: BaseModel) -> BaseModel:
    """Another model of the family where it can draft, with other weights; and otherwise a small Llama."""
    return seeing_base("llava") if base.sight is not None else base_of("llama", 1)


def head_of(kind: str, base: BaseModel, texts: list[list[int]]) -> Drafter:
    return make_head(base, kind).drafter(base, 8)


MAKE: dict[str, MakeDrafter] = {
    "ngram": lambda base, texts: NgramDrafter(8),
    "memory": lambda base, texts: MemoryDrafter(8),
    "cacheback": lambda base, texts: CachebackDrafter(frozen=table_of(texts)),
    "choosing": lambda base, texts: ChoosingDrafter(
        {"head": make_head(base, "ctc").drafter(base, 8), "ngram": NgramDrafter(8)}
    ),
    "ctc + ngram": lambda base, texts: MergedDrafter(make_head(base, "ctc").drafter(base, 8), NgramDrafter(8)),
    "model": lambda base, texts: ModelDrafter(draft_model_of(base), base, 6),
    "stack": lambda base, texts: StackedDrafter(CachebackDrafter(12), draft_model_of(base), base, 6),
    **{kind: partial(head_of, kind) for kind in ("medusa", "hydra", "hydra++", "eagle3, in part", "specformer")},
}
OF_THE_TARGET: dict[str, MakeDrafter] = {
    "exit": lambda base, texts: FirstLayersDrafter(base, 2, 8),
    "imitation": lambda base, texts: imitation(base),
    "stack of models": lambda base, texts: StackedDrafter(ModelDrafter(base_of("llama", 1), base, 12), base, base, 6),
}
"""Drafters with layers of the target model, which must have a KV cache alone."""
HOW: list[list[Any]] = [list(SITUATIONS), [False, True], [1, 3, 7]]
CASES = [
    *pairwise(14, ["llama", "gemma2", "gpt_oss", "qwen3_5_text", "lfm2", "qwen3_vl", "gemma3"], list(MAKE), *HOW),
    *pairwise(6, ["llama", "gemma2", "gpt_oss"], list(OF_THE_TARGET), *HOW),
]


@pytest.mark.parametrize(("family", "drafter", "situation", "behind", "slots"), CASES)
def test_tokens_are_those_of_plain_decoding(
    family: str, drafter: str, situation: str, behind: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_identity(family, (MAKE | OF_THE_TARGET)[drafter], situation, slots, behind=behind, patch=monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "hydra++", "exit", "imitation"])
def test_rows_that_are_not_finite_cost_no_other_row_its_tokens(device: str, name: str) -> None:
    check_innocent_rows(lambda base: (MAKE | OF_THE_TARGET)[name](base, []))


def test_first_layers_with_a_state_do_not_draft() -> None:
    with pytest.raises(LoadError, match="has recurrent layers, and cannot draft"):
        FirstLayersDrafter(hybrid_base("lfm2"), 2, 8)
