"""Drafts that come from elsewhere beside a drafter of the engine's own, and rows that stop where theirs is verified."""

from __future__ import annotations

import random

import pytest

from drafter.budget.contract import StepObservation
from drafter.drafters.contract import Ask, Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.parts.steering import steered
from drafter.requests import Generation, Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.model import BaseModel
from drafter.tree.paths import RowDrafts
from drafter.tree.token_tree import TokenTree
from tests.support.guides import RuleGuides
from tests.support.models import (
    EOS,
    VOCABULARY,
    AdversarialDrafter,
    SpellingTokenizer,
    decode,
    finish,
    plainly,
    random_prompts,
    run_engine,
    tokens_of,
)
from tests.support.trees import FORK

DRAFTED = 6


def requests_of(count: int) -> list[Request]:
    return [
        Request(prompt, SamplingParams(30 - row, temperature=0.8 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(count, seed=5))
    ]


def engine_of(base: BaseModel, own: Drafter, slots: int) -> Engine:
    config = EngineConfig(max_num_seqs=slots, num_draft_tokens=4, max_model_len=96)
    return Engine(base, own, SpellingTokenizer(), config, brought=DRAFTED)


class Device:
    """Drafts for one row: the right tokens, sometimes with a wrong one, and others beside them."""

    def __init__(self, handle: Handle, expected: Generation, seed: int) -> None:
        self.handle, self.right, self.rng = handle, expected.token_ids, random.Random(seed)
        self.have: list[int] = []
        handle.unpark(1)

    def look(self) -> None:
        """Draft as soon as the row is parked again."""
        while not self.handle._deltas.empty():  # type: ignore[union-attr]
            if (delta := self.handle._deltas.get()) is not None:  # type: ignore[union-attr]
                self.have += delta.token_ids
        if self.handle.future.done() or not self.handle.parked or len(self.have) < 1:
            return
        at = len(self.have)
        tokens = self.right[at : at + self.rng.randrange(DRAFTED)]
        if tokens and self.rng.random() < 0.3:
            tokens[self.rng.randrange(len(tokens))] = 3
        self.handle.draft(tokens, range(-1, len(tokens) - 1), at)
        self.handle.unpark(at + 1)


@pytest.mark.parametrize("slots", [2, 9])
@pytest.mark.parametrize("kind", ["plain", "adversarial"])
def test_rows_with_drafts_and_without_give_the_tokens_of_plain_decoding(
    tiny_base: BaseModel, kind: str, slots: int
) -> None:
    requests = requests_of(9)
    expected = plainly(tiny_base, requests)
    engine = engine_of(tiny_base, PlainDecoding() if kind == "plain" else AdversarialDrafter(1, nodes=4), slots)
    handles = [engine.submit(request, stream=row % 3 > 0) for row, request in enumerate(requests)]
    devices = [Device(handles[row], expected[row], row) for row in range(9) if row % 3]
    while not all(handle.future.done() for handle in handles):
        for device in devices:
            device.look()
        engine.step()
    found = [handle.result(0) for handle in handles]
    assert tokens_of(found) == tokens_of(expected)
    by_device = sum(found[row].counts.num_accepted_draft_tokens for row in range(9) if row % 3)
    assert by_device > 60
    if kind == "plain":
        assert not any(found[row].counts.num_draft_tokens for row in range(0, 9, 3))


def test_a_row_stops_with_the_step_that_was_asked_for(tiny_base: BaseModel) -> None:
    request = Request([5, 6, 7], SamplingParams(20, ignore_eos=True))
    (expected,) = run_engine(tiny_base, PlainDecoding(), [request])
    engine = engine_of(tiny_base, PlainDecoding(), 2)
    handle = engine.submit(request, stream=True)
    handle.unpark(1)
    lengths = []
    for _ in range(3):
        finish(engine)
        (sequence,) = engine.scheduler.parked
        lengths.append(at := len(sequence.output))
        handle.draft(expected.token_ids[at : at + 3], [-1, 0, 1], at)
        handle.unpark(at + 1)
    assert lengths == [1, 5, 9]
    handle.unpark()
    finish(engine)
    assert handle.result(0).token_ids == expected.token_ids


def test_what_came_is_verified_whole_and_a_budget_hears_nothing_of_it(tiny_base: BaseModel) -> None:
    seen: list[StepObservation] = []

    class Listening:
        def plan(self, rows: int) -> Ask:
            return Ask(0)

        def observe(self, step: StepObservation) -> None:
            seen.append(step)

        def choices(self) -> tuple[()]:
            return ()

        def renewed(self, member: int) -> None: ...

    requests = [Request(prompt, SamplingParams(9, ignore_eos=True)) for prompt in ([5, 6, 7], [8, 9])]
    expected = run_engine(tiny_base, PlainDecoding(), requests)
    config = EngineConfig(max_num_seqs=2, max_model_len=96)
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config, budget=Listening(), brought=4)
    handles = [engine.submit(request) for request in requests]
    handles[0].draft(expected[0].token_ids[:8], range(-1, 7), 0)  # more than are verified at once
    finish(engine)
    assert handles[0].result(0).counts.per_step_accepted[0] == 4
    assert [(one.rows, one.trees, one.seconds is None) for one in seen[:2]] == [(1, None, True), (2, None, False)]


def test_a_row_without_a_draft_keeps_its_tree() -> None:
    two = TokenTree(*(part.repeat(2, 1) for part in vars(FORK).values()))
    brought = RowDrafts([8, 9, 1], [-1, 0, -1], [1, 2, 1], [-0.5, -1.0, -0.5])
    tree, forced = steered(two, [None, None], 2, 8, 4, [None, brought])
    assert tree.tokens.tolist() == [[7, 3, 5, -1], [7, 8, 1, 9]]
    assert tree.parents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert forced == [0, 0]


def test_what_was_brought_is_cut_by_the_rows_guide(tiny_base: BaseModel) -> None:
    guides = RuleGuides(lambda output: {5, 6} if len(output) < 6 else {EOS}, VOCABULARY, EOS)
    guided = SamplingParams(9, structured_outputs=StructuredOutputs(regex="x"))
    requests = [Request([5, 6, 7], guided), Request([8, 9], SamplingParams(9, ignore_eos=True))]
    config = EngineConfig(max_num_seqs=2, max_model_len=96, num_draft_tokens=3)
    expected = decode(Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), config, guides=guides), requests)
    own = AdversarialDrafter(0, nodes=3)
    engine = Engine(tiny_base, own, SpellingTokenizer(), config, guides=guides, brought=DRAFTED)
    handles = [engine.submit(request) for request in requests]
    right = expected[0].token_ids[:4]
    handles[0].draft([4, *right], [-1, -1, 1, 2, 3], 0)  # the first one is forbidden
    found = finish(engine, handles)
    assert tokens_of(found) == tokens_of(expected)
    assert (found[0].counts.per_step_accepted[0], found[0].valid) == (4, True)
