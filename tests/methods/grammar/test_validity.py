"""Whatever a guide lets end is valid by its schema: random outputs, and those of the embedded model."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from drafter.embedded import EMBEDDED_BASE
from drafter.errors import RequestError
from drafter.methods.grammar.grammars import Grammars
from drafter.structured_outputs import StructuredOutputs
from drafter.text.tokenizers import load_tokenizer
from tests.methods.grammar.record_schemas import SCHEMAS
from tests.support.walks import walk


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(EMBEDDED_BASE))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])


def problems(schema: Any, text: str) -> list[str]:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(json.loads(text))]


def walks(schema: Any, number: int, seed: int = 0) -> list[str]:
    found = [
        walk(grammars().guide(StructuredOutputs(json=schema), []), tokenizer(), Random(seed + one))
        for one in range(number)
    ]
    return [text for text in found if text is not None]


def test_the_schemas_are_schemas_and_there_are_fifty() -> None:
    assert len(SCHEMAS) >= 50
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_outputs_are_valid(name: str) -> None:
    found = walks(SCHEMAS[name], 12)
    assert found
    assert [text for text in found if problems(SCHEMAS[name], text)] == []


numbers = st.one_of(
    st.integers(-(10**6), 10**6), st.decimals(-1000, 1000, places=3).map(float), st.sampled_from([0, 1e-7, 2**53, 0.1])
)


@settings(max_examples=60)
@given(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.lists(numbers, min_size=1, max_size=2, unique=True),
    st.sampled_from([{}, {"multipleOf": 3}, {"multipleOf": 250}]),
    st.integers(0, 1000),
)
def test_random_numbers_are_in_their_bounds(
    kind: str, low: str, high: str, bounds: list[float], multiple: dict[str, int], seed: int
) -> None:
    schema = {"type": kind, **dict(zip((low, high), sorted(bounds), strict=False)), **multiple}
    try:
        found = walks(schema, 4, seed)
    except RequestError as error:
        assume("no integer" not in str(error) and "multiple" not in str(error))
        raise
    assert [text for text in found if problems(schema, text)] == []
