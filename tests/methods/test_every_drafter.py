"""What the core's tests prove of its own drafters holds with each method's: the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce

import pytest
import torch

from drafter.drafters.contract import Drafter
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.heads.checkpoint import new_head
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.cacheback.frozen_table import FrozenTable, NgramCounts
from drafter.methods.draft_models.drafter import StackedDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.target_model.model import BaseModel
from tests.drafter.engine.test_cuda_graph import recorder, requests_of, run, same
from tests.drafter.engine.test_not_finite import check_innocent_rows, device
from tests.drafter.test_identity import (
    check_greedy,
    check_log_probabilities,
    check_sampled,
    every_family,
    some_families,
)
from tests.support.heads import COUNTS, make_head
from tests.support.marks import slow_but
from tests.support.models import plainly, random_model
from tests.support.tapes import TapeRecorder

__all__ = ["device", "recorder"]  # fixtures
HEADS = ("medusa", "hydra++", "eagle3", "specformer")


@cache
def draft_model_of(family: str) -> BaseModel:
    return BaseModel(random_model(family, seed=1))


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


def drafters(base: BaseModel, texts: list[list[int]]) -> dict[str, Drafter]:
    return {
        "ngram": NgramDrafter(),
        "memory": MemoryDrafter(),
        "cacheback": CachebackDrafter(),
        "choosing": ChoosingDrafter({"head": make_head(base, "ctc").drafter(base, 8), "ngram": NgramDrafter(8)}),
        "frozen table": CachebackDrafter(frozen=table_of(texts)),
        "models": MergedDrafter(
            ModelDrafter(draft_model_of(base.config.model_type), base, 6),
            StackedDrafter(CachebackDrafter(12), draft_model_of(base.config.model_type), base, 6),
        ),
        "heads": reduce(MergedDrafter, (make_head(base, kind).drafter(base, 8) for kind in HEADS)),
        "exit": FirstLayersDrafter(base, 2, 10),
        "imitation": imitation(base),
    }


@every_family
def test_greedy_equals_generate(family: str, whole: bool) -> None:
    check_greedy(family, drafters, rarely_right=("heads", "models", "choosing"), whole=whole)


@some_families
def test_sampled_tokens_are_a_function_of_the_seed(family: str, whole: bool) -> None:
    check_sampled(family, drafters, whole=whole)


def test_log_probabilities_do_not_depend_on_the_drafter() -> None:
    check_log_probabilities(drafters)


MAKE: dict[str, Callable[[BaseModel], Drafter]] = {
    "ngram": lambda base: NgramDrafter(8),
    "memory": lambda base: MemoryDrafter(8),
    "exit": lambda base: FirstLayersDrafter(base, 2, 8),
    "imitation": lambda base: imitation(base),
    "ctc + ngram": lambda base: MergedDrafter(make_head(base, "ctc").drafter(base, 8), NgramDrafter(8)),
    **{
        kind: lambda base, kind=kind: make_head(base, kind).drafter(base, 8)  # type: ignore[misc]
        for kind in (*HEADS, "hydra", "eagle3, in part")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "memory", "hydra++", "exit", "imitation", "ctc + ngram"])
def test_rows_that_are_not_finite_cost_no_other_row_its_tokens(device: str, name: str) -> None:
    check_innocent_rows(MAKE[name])


@pytest.mark.parametrize("name", slow_but(["eagle3, in part", "imitation", "ctc + ngram"], MAKE))
def test_steps_that_are_queued_as_a_whole(tiny_base: BaseModel, recorder: TapeRecorder, name: str) -> None:
    """In batches that are refilled, whose rows end at different steps, of a size that is not a power of two."""
    requests = requests_of(11, [{}])
    drafter = MAKE[name](tiny_base)
    same(run(tiny_base, drafter, requests, max_num_seqs=5, num_draft_tokens=8), plainly(tiny_base, requests))
    assert not drafter.spec.graph_safe or recorder.repeated > 20
