from __future__ import annotations

import math

from drafter.base.causal_lm import BaseModel
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.none import PlainDecoding
from drafter.engine.batch_state import Rows
from drafter.engine.warm_up import measure_steps, say_something
from tests.support.models import generate_reference


def test_costs_are_measured_on_texts_of_the_bases_own(tiny_base: BaseModel) -> None:
    rows = Rows(tiny_base, PlainDecoding(), slots=20, max_length=96, packs=True)
    say_something(rows)
    length, said = 48, 24
    for row in range(20):
        text = rows.tokens[row, : length + 1].tolist()
        start = length - said
        expected = generate_reference(tiny_base.model, text[: start + 1], said)
        assert text[start + 1 :][: len(expected)] == expected
    assert len({tuple(text) for text in rows.tokens[:, : length + 1].tolist()}) > 8


def test_every_size_is_measured_and_the_slots_are_left_empty(tiny_base: BaseModel) -> None:
    rows = Rows(tiny_base, NgramDrafter(7), slots=5, max_length=96, packs=True)
    table = measure_steps(rows, graphs=None)
    assert table.batches.tolist() == [1, 4, 5]
    assert table.nodes == (0, 3, 5, 6)
    assert table.verify.shape == table.draft.shape == (3, 4)
    assert (table.verify > 0).all()
    assert (table.draft[:, 0] == 0).all()
    assert (table.draft[:, 1:] > 0).all()
    assert math.isfinite(table.verify.max())
    assert rows.lengths.tolist() == [96] * 5
