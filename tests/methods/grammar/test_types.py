"""Records by types of Python: what a guide lets end is valid by the schema, and by the type."""

from __future__ import annotations

import json
from random import Random

import pytest

from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.record_types import TYPES
from tests.methods.grammar.test_validity import grammars, problems, tokenizer
from tests.support.walks import walk

_SAYS_MORE = {"bytes": 0.5, "address": 0.9, "any address": 0.9}
"""Types that a schema cannot say all of, with the least share of records that they accept."""
_SETS = {"set", "frozen set", "set in an option"}


def check(name: str, number: int) -> None:
    asked = StructuredOutputs(json=TYPES[name])
    ended, accepted = 0, 0
    for seed in range(number):
        guide = grammars().guide(asked, [])
        text = walk(guide, tokenizer(), Random(seed))
        if text is None:
            continue
        wrong = problems(json.loads(asked.json), text)
        assert guide.valid == (wrong == []), (text, wrong)
        assert guide.valid or name in _SETS
        ended += guide.valid
        if guide.valid and asked.record_type is not None and asked.record_type.accepts(text):
            accepted += 1
        else:
            assert not guide.valid or name in _SAYS_MORE, text
    assert ended
    assert accepted >= ended * _SAYS_MORE.get(name, 1)


@pytest.mark.parametrize("name", TYPES)
def test_records_are_valid_by_their_type(name: str) -> None:
    check(name, 4)


@pytest.mark.slow
def test_many_records_are_valid_by_their_type() -> None:
    for name in TYPES:
        check(name, 40)
