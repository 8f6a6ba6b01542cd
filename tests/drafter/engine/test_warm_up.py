from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from drafter.acceptance.contract import ExactVerifier
from drafter.devices import zero_untouched
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.batch import BatchState
from drafter.engine.step import DeviceStep
from drafter.engine.warm_up import generate_texts, measure_steps
from drafter.statistics import StageTimes
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.support.caches import kv_of
from tests.support.heads import make_head
from tests.support.marks import slow_but_tuples
from tests.support.models import AdversarialDrafter, generate_reference, random_model


def device_step(base: BaseModel, drafter: Drafter, slots: int) -> DeviceStep:
    state = BatchState(base, drafter, slots, 96, StageTimes())
    return DeviceStep(base, ExactVerifier(), state, packs=base.allow_packing())


def test_costs_are_measured_on_texts_of_the_bases_own(tiny_base: BaseModel) -> None:
    step = device_step(tiny_base, PlainDecoding(), slots=20)
    generate_texts(step)
    length, said = 48, 24
    for row in range(20):
        text = step.state.tokens[row, : length + 1].tolist()
        start = length - said
        expected = generate_reference(tiny_base.model, text[: start + 1], said)
        assert text[start + 1 :][: len(expected)] == expected
    assert len({tuple(text) for text in step.state.tokens[:, : length + 1].tolist()}) > 8


def test_every_size_is_measured_and_the_slots_are_left_empty(tiny_base: BaseModel) -> None:
    step = device_step(tiny_base, AdversarialDrafter(0, nodes=6), slots=5)
    table = measure_steps(step, queue=None)
    assert table.batches.tolist() == [1, 4, 5]
    assert table.nodes == (0, 1, 2, 3, 4, 5, 6)
    assert table.verify.shape == table.draft[0].shape == (3, 7)
    assert (table.verify > 0).all()
    assert (table.draft[:, :, 0] == 0).all()
    assert (table.draft[:, :, 1:] > 0).all()
    assert math.isfinite(table.verify.max())
    assert step.state.lengths.tolist() == [96] * 5


WARMED = list(product(["adversarial", "ctc"], [None, 7]))


@pytest.mark.parametrize(("kind", "blocks"), slow_but_tuples(WARMED[::3], WARMED))
def test_a_text_that_is_not_finite_leaves_nothing_behind(kind: str, blocks: int | None) -> None:
    base = BaseModel(random_model("gemma2"))
    base.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output.masked_fill((args[0] > 10)[..., None], torch.nan)
    )
    memory = blocks and (blocks + SPARE) * BLOCK * base.new_cache(1, 1).nbytes
    drafter = make_head(base, kind).drafter(base, 6) if kind == "ctc" else AdversarialDrafter(0, nodes=6)
    state = BatchState(base, drafter, 5, 96, StageTimes(), memory)
    measure_steps(DeviceStep(base, ExactVerifier(), state, packs=base.allow_packing()), queue=None)
    assert all(bool(buffer.isfinite().all()) for buffer in kv_of(state.cache).buffers)
    assert state.hidden is None or bool(state.hidden.isfinite().all())


@pytest.mark.parametrize("size", [1, 3, 5000, 3_000_000])
def test_a_buffer_is_zeroed_as_if_nobody_had_used_it(size: int) -> None:
    whole = torch.full((size + 2,), 7.0)
    buffer = whole[1:-1]
    zero_untouched(buffer)
    assert not buffer.any()
    assert whole[[0, -1]].tolist() == [7.0, 7.0]
    buffer += 1
    assert (buffer == 1).all()
