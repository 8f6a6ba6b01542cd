"""Every method drafts after an image as it does after words, and the tokens are those of `generate`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drafter.drafters.contract import Drafter
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.target_model.model import BaseModel
from tests.drafter.target_model.test_images import base, expected, requests, tokens
from tests.support.heads import make_head
from tests.support.images import model_of
from tests.support.marks import slow_but
from tests.support.models import run_engine

HEADS = ("ctc", "medusa", "hydra", "hydra++", "eagle3", "specformer")
MAKE: dict[str, Callable[[str, BaseModel], Drafter]] = {
    "ngram": lambda family, target: NgramDrafter(8),
    "memory": lambda family, target: MemoryDrafter(8),
    "cacheback": lambda family, target: CachebackDrafter(),
    "exit": lambda family, target: FirstLayersDrafter(target, 2, 8),
    "model": lambda family, target: ModelDrafter(BaseModel(model_of(family, seed=1)), target, 6),
    **{kind: lambda family, target, kind=kind: make_head(target, kind).drafter(target, 8) for kind in HEADS},  # type: ignore[misc]
}
FAMILIES = ("qwen3_vl", "idefics3", "qwen2_vl", "gemma3")
FAST = [("qwen3_vl", name) for name in ("memory", "exit", "ctc", "eagle3")]


@pytest.mark.parametrize("pair", slow_but(FAST, [(family, name) for family in FAMILIES for name in MAKE]), ids="-".join)
def test_methods_draft_after_images(pair: tuple[str, str]) -> None:
    family, name = pair
    assert tokens(family, MAKE[name](family, base(family))) == expected(family)


@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], ["qwen2_vl", "qwen3_vl", "paligemma-2"]))
def test_an_exit_behind_all_layers_drafts_what_the_target_model_chooses(family: str) -> None:
    """So it is at the positions of the row's tokens, which an image has moved."""
    seeing = base(family)
    found = run_engine(
        seeing, FirstLayersDrafter(seeing, seeing.num_layers, 1), requests(family), max_num_seqs=4, num_draft_tokens=1
    )
    assert [one.token_ids for one in found] == expected(family)
    for one in found:
        assert one.counts.num_accepted_draft_tokens == one.counts.num_draft_tokens > 0
