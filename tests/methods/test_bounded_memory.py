"""Drafters that remember take no more memory for twice as many rows."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, Loan, MemorySize, TextMemory
from drafter.methods.cacheback import drafter as cacheback
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.statistics import StageTimes
from tests.support.slots import enter

pytestmark = pytest.mark.slow
ROWS = 640
_SLOTS, _PROMPT, _STEPS = 16, 20, 1
_TOKENS = 30
"""Few, so that tables have as many followers of a leader as they may long before half of the rows have come."""


def decode(drafter: Drafter, rows: int, rng: random.Random) -> None:
    """Let rows come and go as an engine would: a prompt, some steps, and texts that others have decoded."""
    for _ in range(0, rows, _SLOTS):
        texts = [[rng.randrange(_TOKENS) for _ in range(_PROMPT)] for _ in range(_SLOTS)]
        if isinstance(drafter, TextMemory):
            drafter.remember([[rng.randrange(_TOKENS) for _ in range(_PROMPT)]])
        for slot, text in enumerate(texts):
            enter(drafter, slot, text)
        for _ in range(_STEPS):
            lengths = [len(text) - 1 for text in texts]
            context = DraftContext(torch.tensor(texts), None, torch.tensor(lengths), lengths)
            drafter.prepare(context)
            drafter.propose(context, Ask(4))
            new = [[rng.randrange(_TOKENS)] for _ in texts]
            drafter.observe(Committed(range(_SLOTS), new))
            texts = [text + some for text, some in zip(texts, new, strict=True)]


@pytest.mark.parametrize(
    "make", [partial(MemoryDrafter, 4, 4_000), partial(MemoryDrafter, 4, 4_000, isolated=True), CachebackDrafter]
)
def test_twice_as_many_rows_take_no_more_memory(make: Callable[[], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cacheback, "_SHARED_LEADERS", 1 << 10)  # full long before half of the rows have come
    drafter, rng = make(), random.Random(0)
    drafter.open(Loan(Mock(), _SLOTS, 100, StageTimes()))
    before = drafter.memory if isinstance(drafter, TextMemory) else MemorySize()
    tracemalloc.start()
    try:
        decode(drafter, ROWS, rng)
        half, _ = tracemalloc.get_traced_memory()
        decode(drafter, ROWS, rng)
        whole, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    after = drafter.memory if isinstance(drafter, TextMemory) else MemorySize()
    assert after.nbytes == before.nbytes
    assert after.tokens <= 2 * (_SLOTS + 8) * 128  # blocks of 128, two for each text that may be written
    assert whole - half < 1 << 18
