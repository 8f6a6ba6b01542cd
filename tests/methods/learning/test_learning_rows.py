from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.methods.learning.rows import LearningRows, RowSample, micro_batches, place_of
from drafter.methods.learning.settings import LearnerSettings
from drafter.training.targets import RegeneratedText


def sample(first: int, output: int = 6, width: int = 4) -> RowSample:
    tokens = torch.cat([torch.tensor([first, 3]), torch.arange(output)])
    return RowSample(str(first), tokens, 2, torch.zeros(len(tokens), width))


def place(first: int) -> float:
    return place_of(torch.tensor([first, 3]))


LEAST = min(range(1000), key=place)
"""The prompt that is held out whatever comes after it."""


def test_the_same_prompts_are_always_held_out() -> None:
    held = [first for first in range(400) if place(first) < 0.1]
    assert 20 <= len(held) <= 60
    assert held[:5] == [0, 3, 9, 14, 22]  # in any process, and any release
    assert [place_of(torch.tensor([first, 3], dtype=torch.int32)) for first in held] == [place(one) for one in held]


def test_of_few_prompts_one_is_held_out() -> None:
    kept = LearningRows(LearnerSettings(held_out_share=1e-9))
    prompts = sorted(range(1, 6), key=place, reverse=True)
    for first in [*prompts, *prompts]:
        kept.add(sample(first))
    assert {text.tokens[0] for text in kept.held_out} == {prompts[-1]}
    assert len(kept.held_out) == 2
    assert {text.tokens[0] for text in kept.take(10)} == set(prompts[:-1])


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 30), max_size=60),
    limit=st.integers(300, 4000),
    rows=st.integers(1, 5),
)
def test_memory_is_bounded_and_no_held_out_prompt_is_learnt_from(sizes: list[int], limit: int, rows: int) -> None:
    chosen = LearnerSettings(buffer_bytes=limit, held_out_share=0.3, held_out_rows=rows, uses=2)
    kept = LearningRows(chosen)
    for first, output in enumerate(sizes):
        kept.add(sample(first, output))
        held = kept.held_out
        assert len(held) <= rows
        largest = max((8 * len(text.tokens) + 16 * len(text.tokens) for text in held), default=0)
        assert kept.nbytes <= limit + max(limit // 4, largest)
    assert kept.seen == len(sizes)
    least = min(map(place, range(len(sizes))), default=0.0)
    assert all(place(text.tokens[0]) < 0.3 or place(text.tokens[0]) == least for text in kept.held_out)
    while texts := kept.take(3):
        assert not any(place(text.tokens[0]) < 0.3 for text in texts)


def test_a_row_is_used_so_often_and_then_forgotten() -> None:
    kept = LearningRows(LearnerSettings(uses=3, held_out_share=1e-9))
    kept.add(sample(LEAST))
    held = kept.nbytes
    for first in range(4):
        kept.add(sample(first))
    used = []
    while texts := kept.take(2):
        used += [text.tokens[0] for text in texts]
    assert sorted(used) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert used[:4] == [3, 2, 1, 0]  # each once before any is used again
    assert kept.nbytes == held


def test_without_room_the_oldest_row_goes_and_one_that_was_used_before_it() -> None:
    kept = LearningRows(LearnerSettings(uses=2, held_out_share=1e-9, buffer_bytes=3 * (8 * 8 + 4 * 4 * 8)))
    kept.add(sample(LEAST))
    for first in range(4):
        kept.add(sample(first))
    assert [text.tokens[0] for text in kept.take(1)] == [3]
    kept.add(sample(4))
    assert [text.tokens[0] for text in kept.take(9)] == [4, 2, 1]


def test_rows_that_nothing_can_be_learnt_from_are_left_out() -> None:
    kept = LearningRows(LearnerSettings())
    kept.add(sample(1, output=0))
    bad = sample(2)
    assert bad.hidden is not None
    bad.hidden[1] = torch.inf
    kept.add(bad)
    assert (len(kept), kept.seen, kept.held_out) == (0, 0, [])
    fine = sample(3)
    assert fine.hidden is not None
    fine.hidden[-1] = torch.nan  # nobody reads what is behind the last token
    kept.add(fine)
    (text,) = [*kept.take(1), *kept.held_out]
    assert text.hidden is not None
    assert bool(text.hidden.isfinite().all())  # masked positions are read, too


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 100))
def test_micro_batches_have_so_many_tokens_at_most(lengths: list[int], most: int) -> None:
    texts = [RegeneratedText([0] * length, 1) for length in lengths]
    parts = micro_batches(texts, most)
    assert sorted(len(text.tokens) for part in parts for text in part) == sorted(lengths)
    for part in parts:
        assert len(part) == 1 or len(part) * max(len(text.tokens) for text in part) <= most
