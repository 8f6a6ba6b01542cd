"""Drafters that remember texts compare them by their keys: a place of an image is that of no other image."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.drafters.contract import Ask, DraftContext, Drafter, Loan
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.prompt import Prompt, Span
from drafter.requests import Request
from drafter.statistics import StageTimes
from drafter.tree.token_tree import PAD_TOKEN
from recipes.cacheback.counting import NgramCounts
from tests.support.trees import check_slice_contract


def frozen() -> Drafter:
    counts = NgramCounts(100)
    counts.add([11, 12, 13, 14] * 4)
    return CachebackDrafter(8, frozen=counts.table(leaders=50, followers=4))


def drafted_after(drafter: Drafter, known: Request, asked: Request) -> set[int]:
    """Return the tokens drafted right after the prompt `asked`, in a drafter that has read the prompt `known`."""
    drafter.open(Loan(Mock(), 2, 100, StageTimes()))
    texts = [np.array(request.prompt_ids) for request in (known, asked)]
    for state in drafter.slots:
        for slot, (text, request) in enumerate(zip(texts, (known, asked), strict=True)):
            state.enter(slot, text, request)
    lengths = [len(text) - 1 for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)
    context = DraftContext(tokens, None, torch.tensor(lengths), lengths)
    drafter.prepare(context)
    tree = drafter.propose(context, Ask(8))
    check_slice_contract(tree)
    return set(tree.tokens[1, 1:][tree.depths[1, 1:] == 1].tolist()) - {PAD_TOKEN}


MAKE = [lambda: MemoryDrafter(8, 4_000), lambda: CachebackDrafter(8), frozen]


@pytest.mark.parametrize("make", MAKE)
@given(
    before=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    size=st.integers(1, 12),
    after=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    other=st.booleans(),
)
def test_what_follows_an_image_is_drafted_after_no_other(
    make: Callable[[], Drafter], before: list[int], size: int, after: list[int], other: bool
) -> None:
    image = [3] * size  # the token of all images
    start, stop = len(before), len(before) + size
    known = Request(Prompt([*before, *image, *after], (Span(start, stop, b"one"),)))
    asked = Request(Prompt([*before, *image], (Span(start, stop, b"other" if other else b"one"),)))
    assert drafted_after(make(), known, asked) == (set() if other else {after[0]})


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("salt", ["", "a key"])
def test_nothing_is_drafted_from_texts_of_another_salt(make: Callable[[], Drafter], salt: str) -> None:
    known, asked = Request([5, 6, 7, 8, 9], salt=salt), Request([5, 6, 7])
    assert drafted_after(make(), known, asked) == (set() if salt else {8})
    assert drafted_after(make(), asked, Request([5, 6, 7, 8, 9, 5, 6, 7], salt=salt)) == {8}  # its own text
