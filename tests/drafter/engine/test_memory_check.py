"""A GPU's memory is planned, and tried, before the first request; a CPU behind the host's back stands for one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.drafters.contract import Drafter, Loan, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.memory import plan_memory, slot_length
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import StepTensors
from drafter.errors import LoadError
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.models import AdversarialDrafter, engine_of, random_model
from tests.support.tapes import queue_steps


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    queue_steps(monkeypatch)


def engine(base: BaseModel, drafter: Drafter, **config: Any) -> Engine:
    return engine_of(base, drafter, **{"max_num_seqs": 4, "max_model_len": 96, **config})


def test_an_engine_that_does_not_fit_is_refused_and_told_what_would(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda device: 1100 << 20)
    with caplog.at_level(logging.INFO, "drafter.engine.memory"):
        # Most of the memory is what 768 graphs are taken to need.
        engine(tiny_base, AdversarialDrafter(0, nodes=7), num_draft_tokens=7)
        with pytest.raises(
            LoadError, match=r"an engine of 90,000 slots takes .* lower max_num_seqs to [\d,]+ .*KV cache"
        ) as told:
            engine(tiny_base, AdversarialDrafter(0, nodes=7), num_draft_tokens=7, max_num_seqs=90_000)
    assert "\n" not in str(told.value)
    assert "in all" in caplog.text


def test_the_dearest_step_is_tried_and_leaves_nothing(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int, SamplingMode]] = []

    def noted(queue: QueuedStep, rows: int, nodes: int, longest: int) -> StepTensors:
        assert longest == 96
        tried.append((rows, nodes, queue.state.mode))
        return whole(queue, rows, nodes, longest)

    whole = QueuedStep.whole
    monkeypatch.setattr(QueuedStep, "whole", noted)
    for drafter in (PlainDecoding(), AdversarialDrafter(0, nodes=7), make_head(tiny_base, "ctc").drafter(tiny_base, 7)):
        made = engine(tiny_base, drafter, num_draft_tokens=7)
        ((rows, nodes, mode),) = tried
        tried.clear()
        assert (rows, nodes) == (4, drafter.spec.max_nodes)
        assert mode.ranked
        assert mode.penalties
        assert made.batch.mode.likeliest
        assert made.batch.lengths.tolist() == [96] * 4


def test_a_step_that_does_not_fit_is_refused_at_the_start(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*step: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(QueuedStep, "whole", fail)
    with pytest.raises(
        LoadError, match=r"a step of 4 slots that samples with every setting does not fit .* lower max_num_seqs"
    ):
        engine(tiny_base, PlainDecoding())


def test_what_drafters_keep_is_in_the_plan(tiny_base: BaseModel) -> None:
    head, config = make_head(tiny_base, "ctc").drafter(tiny_base, 7), EngineConfig(max_num_seqs=4)
    one = plan_memory(tiny_base, head.spec, config, 96, 0).items
    length = slot_length(96, head.spec.max_nodes, head.spec.max_depth)
    head.open(Loan(tiny_base, 4, length, StageTimes()))
    cached = head._reader._cache.nbytes  # type: ignore[attr-defined]
    assert 0 < one["draft's own KV"] <= cached < one["draft's own KV"] // length * (length + 32)
    assert one["hidden states"] == 4 * length * tiny_base.hidden_size * tiny_base.dtype.itemsize
    both = plan_memory(tiny_base, MergedDrafter(head, head).spec, config, 96, 0).items
    assert both["draft's own KV"] == 2 * one["draft's own KV"]
    assert both["hidden states"] == one["hidden states"]


def test_copies_that_attention_makes_are_in_the_plan() -> None:
    base = BaseModel(random_model("llama"), native=False)

    def attention(**config: Any) -> int:
        wanted = EngineConfig(max_num_seqs=16, **config)
        return plan_memory(base, PlainDecoding().spec, wanted, 96, 0).items["attention"]

    groups = base.config.num_attention_heads // base.config.num_key_value_heads
    assert groups > 1
    repeated = attention()  # as transformers does it
    base.allow_packing()
    length, kv = slot_length(96, 0, 0), max(base.kv_bytes_per_token)
    assert repeated - attention() == groups * (16 - 1) * length * kv
    assert attention(kv_gib=0.5) - attention() == (16 - groups) * length * kv
