"""Bounds of numbers, compared with validators near 0, 1, powers of ten and the bounds themselves; and their digits."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from random import Random
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import Field, TypeAdapter, ValidationError

from drafter.drafters.registry import load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.methods.grammar.digits import OUTSIDE, REFUSED, Digits
from drafter.methods.grammar.numbers import with_parts
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.test_validity import base, grammars, tokenizer
from tests.support.models import decode, tokens_of
from tests.support.properties import examples

_BYTES = LLTokenizer("byte")
_PYDANTIC = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}

near = st.builds(
    lambda number, step: math.nextafter(number, step) if step else number,
    st.sampled_from([0.0, 1.0, -1.0, 0.1, 10.0, 0.05, 0.25, 99.9, 1.05, 0.001, 1000.0, -0.5, 1e6]),
    st.sampled_from([None, -math.inf, math.inf]),
)
bounds = st.one_of(
    near,
    st.integers(-(10**6), 10**6),
    st.decimals(-1000, 1000, places=3).map(float),
    st.floats(-5, 5, allow_subnormal=False).map(lambda one: one if abs(one) > 1e-7 else 0.0),
    st.sampled_from([2**53, 2**63 - 1, -(2**63), 10**18, 1e-7]),
)


@st.composite
def bounded(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.sampled_from(["minimum", "exclusiveMinimum"]))
    high = draw(st.sampled_from(["maximum", "exclusiveMaximum"]))
    given_bounds = sorted(draw(st.lists(bounds, min_size=1, max_size=2, unique=True)))
    names = [low, high] if len(given_bounds) == 2 else [draw(st.sampled_from([low, high]))]
    return {"type": draw(st.sampled_from(["number", "integer"])), **dict(zip(names, given_bounds, strict=True))}


def matcher(schema: dict[str, Any]) -> LLMatcher:
    return LLMatcher(_BYTES, LLMatcher.grammar_from_json_schema(json.dumps(with_parts(schema))), log_level=0)


def accepts(grammar: LLMatcher, text: str) -> bool:
    one = grammar.deep_copy()
    return one.try_consume_tokens(list(text.encode())) == len(text) and one.is_accepting()


def within(schema: dict[str, Any], value: float) -> bool:
    """Return whether jsonschema and Pydantic take a value; they agree."""
    given_bounds: dict[str, Any] = {_PYDANTIC[name]: bound for name, bound in schema.items() if name in _PYDANTIC}
    try:
        TypeAdapter(Annotated[float, Field(**given_bounds)]).validate_json(json.dumps(value))
        taken = schema["type"] == "number" or float(value).is_integer()
    except ValidationError:
        taken = False
    exact = abs(value) <= 2**53  # beyond, Pydantic compares the nearest float
    assert not exact or taken == Draft202012Validator(schema).is_valid(value)
    return taken


def plain(number: float) -> str:
    """Return a number's text without an exponent."""
    text = json.dumps(number)
    return format(Decimal(text), "f") if "e" in text else text


@examples(60)
@given(bounded(), st.data())
def test_exactly_the_numbers_within_bounds_are_accepted(schema: dict[str, Any], data: st.DataObject) -> None:
    grammar = matcher(schema)
    given_bounds = [float(bound) for bound in schema.values() if not isinstance(bound, str)]
    values: list[float] = [0, 1, *given_bounds]
    for bound in given_bounds:
        values += [bound * 0.9, bound * 1.1, round(bound, 1), math.floor(bound), math.ceil(bound), bound + 1, bound - 1]
        values.append(round(bound + data.draw(st.floats(-3, 3)), 4))
    for value in values:
        if 0 < abs(value) < 1e-19 or abs(value) > 2**53 or str(value) == "-0.0":
            continue
        wanted = within(schema, value) and not (schema["type"] == "integer" and isinstance(value, float))
        nearest = min(abs(value - bound) for bound in given_bounds)
        if wanted and 0 < nearest <= 2 * math.ulp(max(abs(value), 1e-7)):  # a bound may be off by its last bit
            continue
        if wanted and value in given_bounds and len(re.sub(r"^[-0.]*|\D", "", plain(value))) > 15:
            continue
        assert grammar.is_error() or accepts(grammar, plain(value)) == wanted, value
        assert not (grammar.is_error() and wanted)


@examples(60)
@given(bounded(), st.data())
def test_texts_that_begin_as_a_bound_are_within_it(schema: dict[str, Any], data: st.DataObject) -> None:
    grammar = matcher(schema)
    for bound in [one for one in schema.values() if not isinstance(one, str)]:
        whole = plain(float(bound))
        for _ in range(20):
            end = data.draw(st.integers(1, len(whole)))
            text = whole[:end] + data.draw(st.text("0123456789", max_size=max(0, 18 - end)))
            if re.fullmatch(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?", text) and accepts(grammar, text):
                assert Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.9", "0.99", "0.5", "0.999999999999"], ["0", "0.0", "1"]),
        ({"minimum": 0, "exclusiveMaximum": 1}, ["0", "0.0", "0.9", "0.90"], ["1", "1.0", "0.99999999999999999"]),
        ({"minimum": 0, "maximum": 0.05}, ["0.0", "0.05", "0.01", "0"], ["0.06", "0.1"]),
        ({"exclusiveMinimum": -1}, ["-0.9", "0", "5.25"], ["-1", "-1.0"]),
        ({"exclusiveMaximum": 5}, ["4.9", "4", "-7"], ["5", "5.0"]),
        ({"minimum": 1, "maximum": 1}, ["1"], ["0", "2"]),
        ({"multipleOf": 0.5, "minimum": 0, "maximum": 2}, ["0", "0.5", "1", "1.0", "1.5", "2"], ["0.25", "2.5"]),
        ({"multipleOf": 0.01, "maximum": 9}, ["0.07", "8.99", "0.1", "-3", "9"], ["0.001", "9.01"]),
        ({"multipleOf": 5, "exclusiveMinimum": 0.5}, ["5", "100"], ["0", "4"]),
    ],
)
def test_numbers_that_people_ask_for(schema: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    grammar = matcher({"type": "number", **schema})
    assert [one for one in accepted if not accepts(grammar, one)] == []
    assert [one for one in refused if accepts(grammar, one)] == []


def test_whole_numbers_are_multiples_of_a_fraction() -> None:
    for multiple, step in ((2.5, 5), (0.5, 1), (0.4, 2)):
        grammar = matcher({"type": "integer", "multipleOf": multiple})
        assert [one for one in range(-12, 13) if accepts(grammar, str(one))] == [
            one for one in range(-12, 13) if one % step == 0
        ]


def test_types_beside_numbers_stay() -> None:
    grammar = matcher({"type": ["number", "null"], "minimum": 3})
    assert [accepts(grammar, one) for one in ("null", "3", "2", '"3"')] == [True, True, False, False]
    grammar = matcher({"maximum": 3})
    assert [accepts(grammar, one) for one in ("null", "3", "4", '"4"', "[4]")] == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("1" * 19, True),
        ("1" * 20, False),
        (f"0.{'0' * 20}", True),
        (f"0.{'0' * 21}", False),
        (f"-0.000{'1' * 17}", True),
        (f"12.{'1' * 16}", False),
        ("1.8e99, 1e-99", True),
        ("1e100", False),
        (f'{{"{"1" * 50}": "\\"{"1" * 50}", "a": [{"1" * 19}, {"2" * 19}]}}', True),
    ],
)
def test_numbers_end(text: str, ends: bool) -> None:
    digits, state = Digits(lambda token: bytes([token]), 256), OUTSIDE
    for byte in text.encode():
        state = state if state == REFUSED else digits.after(state, byte)
    assert (state != REFUSED) == ends


def test_a_model_that_goes_on_with_digits_ends_and_drafts_change_no_token() -> None:
    schema = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 2}
    digits = {token: 30.0 for token in range(len(tokenizer())) if tokenizer().decode([token]).isdigit()}
    found = []
    for drafter in ("none", "ngram", "forced"):
        engine = Engine(base(), load_drafter(drafter, base(), 8), tokenizer(), EngineConfig(num_draft_tokens=8))
        asked = StructuredOutputs(json=schema)
        params = [
            SamplingParams(max_new_tokens=80, temperature=1.0, seed=seed, structured_outputs=asked, logit_bias=digits)
            for seed in range(3)
        ]
        results = decode(engine, [Request([5, 6], one) for one in params])
        found.append(tokens_of(results))
    assert found[0] == found[1] == found[2]
    texts = [tokenizer().decode(one) for one in found[0]]
    assert all(re.match(r"\[[0-9.]{1,42}, ", text) for text in texts), texts


def test_what_the_digits_leave_out_is_not_consumed_either() -> None:
    guide, random = grammars().guide(StructuredOutputs(json={"type": "number"}), []), Random(0)
    digits = [token for token in range(len(tokenizer())) if tokenizer().decode([token]).isdigit()]
    count = 0
    while taken := [token for token in digits if guide.consume(token) and (guide.rewind(1) or True)]:
        assert guide.consume(random.choice(taken))
        count += 1
    assert 5 < count <= 19
