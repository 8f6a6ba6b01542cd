"""Every method drafts after an image as it does after words, and the tokens are those of `generate`."""

from __future__ import annotations

import pytest

from drafter.drafters.contract import Drafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.early_exit.drafter import ExitDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.target_model.model import BaseModel
from tests.drafter.target_model.test_images import base, expected, tokens
from tests.support.heads import make_head
from tests.support.images import model_of
from tests.support.marks import slow_but


def drafters(target: BaseModel, family: str) -> dict[str, Drafter]:
    kinds = ("ctc", "medusa", "hydra", "hydra++", "eagle3", "specformer")
    return {
        "ngram": NgramDrafter(8),
        "memory": MemoryDrafter(8),
        "cacheback": CachebackDrafter(),
        "exit": ExitDrafter(target, 2, 8),
        "model": ModelDrafter(BaseModel(model_of(family, seed=1)), target, 6),
        **{kind: make_head(target, kind).drafter(target, 8) for kind in kinds},
    }


@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], ["qwen3_vl", "idefics3", "qwen2_vl", "gemma3"]))
def test_methods_draft_after_images(family: str) -> None:
    target = base(family)
    for name, drafter in drafters(target, family).items():
        assert tokens(family, drafter) == expected(family), name
