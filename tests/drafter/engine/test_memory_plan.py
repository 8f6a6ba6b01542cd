from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.acceptance.contract import ExactVerifier
from drafter.engine.batch import BatchState
from drafter.engine.config import EngineConfig
from drafter.engine.cuda_graph import step_shape
from drafter.engine.engine import Engine
from drafter.engine.memory import EngineSizes, engine_sizes, plan_memory, slot_length, what_would_fit
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import _DEAREST
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.statistics import StageTimes
from tests.support.large_bases import LLAMA_8B, large_base
from tests.support.live_memory import LiveMemory
from tests.support.marks import slow_but

SIZES = EngineSizes(
    slots=64,
    max_length=2022,
    nodes=15,
    depth=9,
    vocabulary=128_256,
    width=4096,
    inner=14_336,
    groups=4,
    number=2,
    kv=131_072,
    layer_kv=4096,
    copied_kv=0,
    draft_kv=16_384,
    hidden=8192,
    prompt=2048,
)
"""Llama-3.1-8B in bf16, and a draft head with one layer of attention."""
GIB = 2**30


def test_llama_8b() -> None:
    assert SIZES.length == slot_length(2022, 15, 9) == 2048
    assert plan_memory(SIZES).items == {
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


def test_what_changes_an_item() -> None:
    items = plan_memory(SIZES).items
    grown = plan_memory(replace(SIZES, kv_limit=3 * GIB, copied_kv=1, graphs=10)).items
    assert grown["KV cache"] == 3 * GIB
    assert grown["attention"] == items["attention"] - 4 * 2048 * 4096 + 64 * 2048 * 4096
    step = sum(grown[item] for item in ("forward", "attention", "logits", "sampling"))
    assert grown["graphs"] == step + 10 * 4 * 2**20  # they do not share the memory of steps that run as they are
    in_parts = plan_memory(replace(SIZES, in_parts=True)).items
    assert in_parts["attention"] == 2048 * 2048 * 5 + 4 * 2048 * 4096  # the mask of a prompt is larger than trees'
    assert plan_memory(replace(SIZES, kv_limit=30 * GIB)).items["KV cache"] == 16 * GIB


def test_a_plan_is_a_table() -> None:
    plan = plan_memory(SIZES)
    assert plan.table().splitlines()[0].split() == ["KV", "cache", "16.00", "GiB"]
    assert plan.table().splitlines()[-1].startswith("in all")
    assert str(plan).startswith("KV cache 16.00 GiB, draft's own KV 2.00 GiB")


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(64, 8192), st.integers(0, 63), st.integers(1, 40))
def test_what_would_fit_fits_and_one_more_would_not(slots: int, max_length: int, nodes: int, free: int) -> None:
    sizes = replace(SIZES, slots=slots, max_length=max_length, nodes=nodes)
    said = what_would_fit(sizes, free * GIB)
    for part in said.removeprefix("lower ").split(" or ") if " to " in said else ():
        setting, number = part.split(" to ")
        name = {"max_num_seqs": "slots", "max_model_len": "max_length", "num_draft_tokens": "nodes"}[setting]
        value = int(number.replace(",", ""))

        def total(value: int, name: str = name) -> int:
            changed: dict[str, Any] = {name: value}
            return plan_memory(replace(sizes, **changed)).total

        assert total(value) <= free * GIB
        assert value == getattr(sizes, name) or total(value + 1) > free * GIB


def test_what_would_fit_in_words() -> None:
    assert what_would_fit(SIZES, 12 * GIB) == "lower max_num_seqs to 37 or max_model_len to 1,126"
    assert (
        what_would_fit(SIZES, GIB // 4)
        == "lower max_num_seqs, max_model_len and num_draft_tokens together, or use another GPU"
    )


SHAPES = [(64, 2048, 15), (1, 8192, 63), (256, 2048, 7)]


@pytest.mark.parametrize("shape", slow_but(SHAPES[:1], SHAPES), ids=str)
def test_steps_and_prompts_take_no_more_than_planned(shape: tuple[int, int, int]) -> None:
    """Counted on tensors without numbers; what kernels themselves need is not. No tensor is one of `[B, N, V]` fp64."""
    slots, max_length, nodes = shape
    config = deepcopy(LLAMA_8B)
    config.num_hidden_layers = 2  # all are alike, and give back what they took
    with large_base(config) as base:
        drafter = NgramDrafter(nodes)
        state = BatchState(base, drafter, slots, max_length, StageTimes())
        step = DeviceStep(base, ExactVerifier(), state, packs=False)
        items = plan_memory(
            engine_sizes(base, drafter.spec, EngineConfig(max_num_seqs=slots, max_model_len=max_length), max_length, 0)
        ).items
        assert items["KV cache"] == state.cache.nbytes
        assert items["texts"] == state.tokens.nbytes
        state.mode = _DEAREST
        with LiveMemory() as step_memory:
            Engine.decode_shape(step, step_shape(step, slots, nodes, max_length))
        with LiveMemory() as prompt_memory:
            prompt = torch.zeros(min(2048, max_length), dtype=torch.long, device=base.device)
            base.prefill(state.cache, 0, [prompt], [max_length - len(prompt)])
        transient = {name: items[name] for name in ("forward", "attention", "logits", "sampling")}
        assert step_memory.peak <= sum(transient.values())
        # What a step takes is its logits and what sampling makes of each row's: not much less than what is planned.
        assert step_memory.peak >= 0.6 * (transient["logits"] + transient["sampling"])
        assert step_memory.largest <= max(transient["logits"], transient["attention"])
        assert prompt_memory.peak <= transient["forward"] + transient["attention"]
