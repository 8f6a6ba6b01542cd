"""Plain decoding's tokens, whoever drafts, for whatever target model, in every situation of an engine.

A case is a family, a drafter, a situation, whether the host reads a step's outcome one step later, as on a GPU, and a
number of slots. Its requests are greedy and random, begin alike and end at different times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from drafter.drafters.contract import Drafter
from drafter.engine.engine import Engine
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.cache import BLOCK, SPARE, GrowingBlocks
from drafter.target_model.model import BaseModel
from tests.support.hybrids import HYBRIDS, hybrid_base
from tests.support.images import FAMILIES as SEEING
from tests.support.images import prompts_of, seeing_base
from tests.support.models import (
    DEVICE,
    FAMILIES,
    base_of,
    decode,
    engine_of,
    finish,
    plainly,
    random_prompts,
    texts_of,
    tokens_of,
)
from tests.support.tapes import queue_steps

MakeDrafter = Callable[[BaseModel, list[list[int]]], Drafter]
"""Makes a drafter for a target model, which may know the texts that will be decoded."""
Drive = Callable[[Engine, Sequence[Request]], list[Generation]]
_SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"frequency_penalty": 0.5},
    {"temperature": 1.0},
]
_NODES, _LONGEST = 8, 96


@cache
def target_of(family: str) -> BaseModel:
    assert (family in FAMILIES) + (family in HYBRIDS) + (family in SEEING) == 1
    return (base_of if family in FAMILIES else hybrid_base if family in HYBRIDS else seeing_base)(family)


@cache
def requests_of(family: str) -> tuple[Request, ...]:
    if family in SEEING:
        return tuple(
            Request(prompt, SamplingParams(12, temperature=row % 2, seed=row, ignore_eos=True))
            for row, prompt in enumerate(prompts_of(family))
        )
    prompts, beginning = random_prompts(7, seed=3), [3 + place * 7 % 90 for place in range(21)]
    prompts[2], prompts[5] = [*beginning, 5, 6], [*beginning, 7]
    return tuple(
        Request(
            prompt, SamplingParams(40 if not row else 16 - row, seed=row, ignore_eos=row % 3 > 0, **_SETTINGS[row % 4])
        )
        for row, prompt in enumerate(prompts)
    )


def _in_pieces(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Prompts are read a few tokens at a time while other rows are decoded, and somebody watches all of them."""
    engine.scheduler.chunk = 5
    return decode(engine, requests, stream=True)


def _kept(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Rows that have ended are continued from."""
    decode(engine, requests)
    found = decode(engine, requests)
    assert sum(one.num_cached_tokens for one in found) > 0
    return found


def _parked(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    found, parked = decode_parked(engine, requests, steps=40, seed=engine.config.max_num_seqs)
    assert parked > 0
    return found


def decode_parked(
    engine: Engine, requests: Sequence[Request], *, steps: int, seed: int
) -> tuple[list[Generation], int]:
    """Decode rows that wait for a while, in their slots or out of them; and say how many did, summed over `steps`."""
    chosen, parked = random.Random(seed), 0
    handles = [engine.submit(request, stream=row % 3 == 0) for row, request in enumerate(requests)]
    for _ in range(steps):
        for handle in handles:
            if chosen.random() < 0.2:
                handle.park()
            elif chosen.random() < 0.3:
                handle.unpark()
        engine.step()
        parked += len(engine.scheduler.parked)
    for handle in handles:
        handle.unpark()
    return finish(engine, handles), parked


def _preempted(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Half of the rows give up their slots now and then, as where memory has run out, and come back."""
    chosen = random.Random(1)
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
        if chosen.random() < 0.3 and len(engine.scheduler.in_slots) > 1:
            engine._preempt()
    assert engine.config.max_num_seqs == 1 or engine.state().preemptions > 0
    return finish(engine, handles)


SITUATIONS: dict[str, Drive] = {
    "a batch": decode,
    "growing rows": decode,
    "prompts in pieces": _in_pieces,
    "rows that are kept": _kept,
    "rows that are parked": _parked,
    "rows that are preempted": _preempted,
}


def longest_of(family: str) -> int:
    return max(len(one.prompt_ids) for one in requests_of(family)) + 12 if family in SEEING else _LONGEST


def config_of(family: str, drafter: Drafter, situation: str, slots: int) -> dict[str, Any]:
    """Return the settings of an engine in a situation."""
    longest = longest_of(family)
    config: dict[str, Any] = {"max_num_seqs": slots, "num_draft_tokens": _NODES, "max_model_len": longest}
    if situation == "growing rows":  # there is memory for one row of full length, and for half of another
        need, blocks = target_of(family).cache_bytes, -(-(longest + 2 * drafter.spec.positions) // BLOCK) * 3 // 2
        config["kv_gib"] = (need.position * BLOCK * (blocks + SPARE) + need.slot * slots + need.once) / 2**30
    return config


def check_identity(
    family: str, make: MakeDrafter, situation: str, slots: int, *, behind: bool, patch: pytest.MonkeyPatch
) -> int:
    """Check that a case's tokens are those of plain decoding. Return how many steps were recorded and repeated."""
    base, requests = target_of(family), requests_of(family)
    expected = plainly(base, requests, max_model_len=longest_of(family))
    recorder = queue_steps(patch) if behind and DEVICE.type == "cpu" else None  # on a GPU it is behind anyway
    drafter = make(base, texts_of(requests, expected))
    engine = engine_of(base, drafter, **config_of(family, drafter, situation, slots))
    assert tokens_of(SITUATIONS[situation](engine, requests)) == tokens_of(expected)
    engine.scheduler.kept.clear()
    if situation == "growing rows" and slots > 2 and base.cache_bytes.position:
        assert isinstance(engine.batch.cache.blocks, GrowingBlocks)
        assert not engine.batch.cache.blocks.table.any()  # all memory has been given back
    return recorder.repeated if recorder else 0
