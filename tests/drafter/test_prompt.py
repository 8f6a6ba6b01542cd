"""Texts are compared by keys: by salt, ids, and what a prompt's spans stand for."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.errors import RequestError
from drafter.prompt import Prompt, Span
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import engine_of, finish

BEFORE, PLACES, AFTER = list(range(20, 32)), [9] * 6, [5, 6, 7]
IDS = [*BEFORE, *PLACES, *AFTER]


def prompt(*digests: bytes, size: int = len(PLACES)) -> Prompt:
    """The same ids for all: one span of `size` places for each digest, in a row."""
    starts = [len(BEFORE) + place * size for place in range(len(digests))]
    return Prompt(IDS, tuple(Span(start, start + size, one) for start, one in zip(starts, digests, strict=True)))


def shared(first: Prompt, second: Prompt) -> int:
    return first.key("").shared(second.key(""))


def test_a_common_beginning_is_counted_in_tokens() -> None:
    assert shared(Prompt([1, 2, 3]), Prompt([1, 2, 4])) == 2
    assert shared(Prompt([1, 2]), Prompt([1, 2, 4])) == 2
    assert shared(Prompt([2]), Prompt([1])) == shared(Prompt([]), Prompt([1])) == 0
    first, second = np.array([1, 2, 3]), np.array([1, 2, 4])
    assert Prompt([1]).key("", first).shared(Prompt([1, 2]).key("", second)) == 2


def test_a_salt_shares_with_itself_alone() -> None:
    one = Prompt([1, 2])
    assert one.key("a").shared(one.key("a")) == 2
    assert one.key("a").shared(one.key("b")) == one.key("").shared(one.key("b")) == 0
    assert one.key("a").beginning(1) != one.key("b").beginning(1)


def test_spans_are_compared_by_what_they_stand_for() -> None:
    assert shared(prompt(b"one"), prompt(b"one")) == len(IDS)
    assert shared(prompt(b"one"), prompt(b"two")) == len(BEFORE)
    assert shared(prompt(b"one"), prompt()) == len(BEFORE)
    assert shared(prompt(b"one", b"two", size=3), prompt(b"one", b"three", size=3)) == len(BEFORE) + 3
    # Two of the same are not one that is twice as long.
    assert shared(prompt(b"one", b"one", size=3), prompt(b"one")) == len(BEFORE)


def test_inputs_are_compared_unless_they_follow_from_digests() -> None:
    def with_inputs(value: int) -> Prompt:
        return replace(prompt(b"one"), inputs={"pixel_values": np.full(3, value)})

    assert shared(with_inputs(1), with_inputs(1)) == len(IDS)
    assert shared(with_inputs(1), with_inputs(2)) == shared(with_inputs(1), prompt(b"one")) == 0
    first, second = (Prompt.of_images(IDS, one.spans, one.inputs) for one in map(with_inputs, (1, 2)))
    assert shared(first, pickle.loads(pickle.dumps(second))) == len(IDS)
    assert shared(first, replace(first, inputs=second.inputs)) == 0


@pytest.mark.parametrize("span", [Span(3, 3, b""), Span(-1, 2, b""), Span(2, 5, b"")])
def test_a_span_outside_of_its_prompt_is_refused(span: Span) -> None:
    with pytest.raises(RequestError, match="out of order or outside"):
        Prompt([1, 2, 3, 4], (span,))
    with pytest.raises(RequestError, match="out of order or outside"):
        Prompt([1, 2, 3, 4], (Span(1, 3, b""), Span(2, 4, b"")))


def test_token_ids_become_a_prompt() -> None:
    request = Request([1, 2])
    assert request.prompt == Prompt([1, 2]) == pickle.loads(pickle.dumps(request)).prompt
    assert list(request.prompt_ids) == [1, 2]


@pytest.mark.parametrize(("digests", "expected"), [((b"one", b"two"), len(BEFORE)), ((b"one", b"one"), len(IDS) - 1)])
@pytest.mark.parametrize("together", [False, True])
def test_rows_share_up_to_the_first_span_that_differs(
    tiny_base: BaseModel, digests: tuple[bytes, bytes], expected: int, together: bool
) -> None:
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=2)
    settings = SamplingParams(max_new_tokens=8, ignore_eos=True)
    handles = []
    for digest in digests:
        handles.append(engine.submit(Request(prompt(digest), settings)))
        if not together:
            engine.step()
    finish(engine)
    # A row waits for one that enters beside it only if that has more than half of its prompt.
    assert engine.state().shared_tokens == expected
    first, second = (handle.result(0).token_ids for handle in handles)
    assert first == second
