from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.contract import ExactVerifier
from drafter.drafters.contract import Ask, DraftSpec
from drafter.engine.batch import BatchState
from drafter.engine.config import EngineConfig
from drafter.engine.memory import MemoryPlan, plan_memory, rows_to_keep, slot_length, what_would_fit
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import _DEAREST
from drafter.statistics import StageTimes
from drafter.target_model.attention import flash_prefix_attention
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from tests.support.large_bases import LLAMA_8B, large_base
from tests.support.live_memory import LiveMemory
from tests.support.marks import slow_but
from tests.support.models import AdversarialDrafter
from tests.support.properties import examples

SPEC = DraftSpec(max_nodes=15, max_depth=9, hidden_layers=(LM_HEAD_INPUT,), bytes_per_token=16_384)
"""A draft head with one layer of attention."""
GIB = 2**30


@pytest.fixture(scope="module")
def llama() -> BaseModel:
    """Llama-3.1-8B in bf16, whose trees are masked."""
    with large_base(deepcopy(LLAMA_8B)) as base:  # which attention it has is noted there
        base._model_code.prefix_attention = None
        return base


def plan(
    base: BaseModel,
    slots: int = 64,
    max_length: int = 2022,
    nodes: int = 15,
    *,
    graphs: int = 0,
    kv_gib: float | None = None,
) -> MemoryPlan:
    config = EngineConfig(max_num_seqs=slots, kv_gib=kv_gib)
    return plan_memory(base, replace(SPEC, max_nodes=nodes), config, max_length, graphs)


def advice(base: BaseModel, free: int, slots: int = 64, max_length: int = 2022, nodes: int = 15) -> str:
    config = EngineConfig(max_num_seqs=slots)
    return what_would_fit(base, replace(SPEC, max_nodes=nodes), config, max_length, 0, free)


def test_llama_8b(llama: BaseModel) -> None:
    assert slot_length(2022, 15, 9) == 2048
    assert plan(llama).items == {
        "KV cache": 16 * GIB,
        "draft's own KV": 2 * GIB,
        "hidden states": GIB,
        "texts": GIB // 1024,
        "forward": 2048 * 2 * (10 * 4096 + 3 * 14_336),
        "attention": 64 * 16 * 4 * 2048 * 5 + 4 * 2048 * 4096,
        "logits": 64 * 16 * 128_256 * 2,
        "sampling": 64 * 128_256 * 8 * 11,
        "graphs": 0,
    }


def test_a_drafter_that_runs_in_the_target_models_cache_has_room_there(llama: BaseModel) -> None:
    spec = DraftSpec(max_nodes=15, max_depth=9, run=58)
    found = plan_memory(llama, spec, EngineConfig(max_num_seqs=64), 2022, 0).items
    assert found["KV cache"] == 64 * slot_length(2022, 57, 9) * llama.cache_bytes.position
    assert found["draft's own KV"] == 0


def test_what_changes_an_item(llama: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    items = plan(llama).items
    grown = plan(llama, kv_gib=3, graphs=30).items
    assert grown["KV cache"] == 3 * GIB
    assert grown["attention"] == items["attention"] - 4 * 2048 * 4096 + 64 * 2048 * 4096
    step = sum(grown[item] for item in ("forward", "attention", "logits", "sampling"))
    # They do not share the memory of steps that run as they are, and one part leaves for the next what is in buffers.
    buffers = grown["logits"] + 64 * 16 * (128_256 // 8 + 2 * 4096 + 32)
    assert grown["graphs"] == step + 10 * 4 * 2**20 + buffers
    assert plan(llama, kv_gib=30).items["KV cache"] == 16 * GIB
    monkeypatch.setattr(llama._model_code, "prefix_attention", flash_prefix_attention)
    in_parts = plan(llama).items
    assert in_parts["attention"] == 2048 * 2048 * 5 + 4 * 2048 * 4096  # the mask of a prompt is larger than trees'


def test_a_plan_is_a_table(llama: BaseModel) -> None:
    table = plan(llama).table().splitlines()
    assert table[0].split() == ["KV", "cache", "16.00", "GiB"]
    assert table[-1].startswith("in all")
    assert str(plan(llama)).startswith("KV cache 16.00 GiB, draft's own KV 2.00 GiB")


@examples(30)
@given(st.integers(1, 400), st.integers(64, 8192), st.integers(0, 63), st.integers(1, 40))
def test_what_would_fit_fits_and_one_more_would_not(
    llama: BaseModel, slots: int, max_length: int, nodes: int, free: int
) -> None:
    sizes = {"slots": slots, "max_length": max_length, "nodes": nodes}
    said = advice(llama, free * GIB, **sizes)
    for part in said.removeprefix("lower ").split(" or ") if " to " in said else ():
        setting, number = part.split(" to ")
        name = {"max_num_seqs": "slots", "max_model_len": "max_length", "num_draft_tokens": "nodes"}[setting]
        value = int(number.replace(",", ""))
        assert plan(llama, **sizes | {name: value}).total <= free * GIB
        assert value == sizes[name] or plan(llama, **sizes | {name: value + 1}).total > free * GIB


def test_what_would_fit_in_words(llama: BaseModel) -> None:
    assert advice(llama, 12 * GIB) == "lower max_num_seqs to 37 or max_model_len to 1,126"
    assert (
        advice(llama, GIB // 4) == "lower max_num_seqs, max_model_len and num_draft_tokens together, or use another GPU"
    )


def test_rows_that_have_ended_get_half_of_what_is_left(llama: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_seqs=8)

    def found(left: int, **settings: Any) -> int:
        monkeypatch.setattr("drafter.devices.free_bytes", lambda device: total(0) + left)
        return rows_to_keep(llama, SPEC, replace(config, **settings), 2022, 0)

    def total(kept: int) -> int:
        return plan_memory(llama, SPEC, replace(config, kept_rows=kept), 2022, 0).total

    assert [found(-GIB), found(2 * (total(5) - total(0))), found(1 << 50)] == [0, 5, 16]
    assert found(-GIB, kept_rows=7) == 7
    # Beside all rows of full length; where these share blocks, what is kept takes those that nobody needs.
    assert [found(1 << 50, kv_gib=2.5), found(1 << 50, kv_gib=1)] == [2, 16]


SHAPES = [(64, 2048, 15), (1, 8192, 63), (256, 2048, 7)]


@pytest.mark.parametrize("shape", slow_but(SHAPES[:1], SHAPES), ids=str)
def test_steps_and_prompts_take_no_more_than_planned(shape: tuple[int, int, int]) -> None:
    """Counted on tensors without numbers; what kernels themselves need is not. No tensor is one of `[B, N, V]` fp64."""
    slots, max_length, nodes = shape
    shape_of_model = deepcopy(LLAMA_8B)
    shape_of_model.num_hidden_layers = 2  # all are alike, and give back what they took
    with large_base(shape_of_model) as base:
        drafter = AdversarialDrafter(0, nodes)
        state = BatchState(base, drafter, slots, max_length, StageTimes(), kept=3)
        step = DeviceStep(base, ExactVerifier(), state, packs=False)
        config = EngineConfig(max_num_seqs=slots, max_model_len=max_length, kept_rows=3)
        items = plan_memory(base, drafter.spec, config, max_length, 0).items
        assert items["KV cache"] == state.cache.nbytes
        assert items["texts"] == state.tokens.nbytes
        state.mode = _DEAREST
        with LiveMemory() as step_memory:
            tree = step.draft(state.bounded_context(slots, max_length), Ask(nodes))
            step.finish(step.verify(tree, state.capacity), slice(0, slots))
        with LiveMemory() as prompt_memory:
            prompt = torch.zeros(min(2048, max_length), dtype=torch.long, device=base.device)
            base.prefill(state.cache, 0, [prompt], [max_length - len(prompt)])
        transient = {name: items[name] for name in ("forward", "attention", "logits", "sampling")}
        assert step_memory.peak <= sum(transient.values())
        # What a step takes is its logits and what sampling makes of each row's: not much less than what is planned.
        assert step_memory.peak >= 0.6 * (transient["logits"] + transient["sampling"])
        assert step_memory.largest <= max(transient["logits"], transient["attention"])
        assert prompt_memory.peak <= transient["forward"] + transient["attention"]
