"""Whatever a guide lets end is valid by its schema: random outputs, and those of the embedded model."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import RequestError
from drafter.methods.grammar.grammars import Grammars
from drafter.requests import Generation, Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from tests.methods.grammar.record_schemas import SCHEMAS
from tests.support.models import decode, tokens_of
from tests.support.properties import examples
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


@examples(60)
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
        assume("nothing is allowed" not in str(error) and "multiple" not in str(error))
        raise
    assert [text for text in found if problems(schema, text)] == []


DRAFTERS = ("forced", "ngram", "auto", str(EMBEDDED_HEADS / "ctc"))


@cache
def base() -> BaseModel:
    return load_base(EMBEDDED_BASE, dtype="float32", device="cpu")


def outputs(drafter: str, requests: list[Request], length: int = 256) -> list[Generation]:
    config = EngineConfig(max_num_seqs=16, num_draft_tokens=8, max_model_len=length)
    engine = Engine(base(), load_drafter(drafter, base(), 8), tokenizer(), config)
    return decode(engine, requests)


def test_texts_longer_than_what_is_worked_out_at_once_are_the_same_with_every_drafter() -> None:
    long = "Anna has five apples. " * 60
    regex, choice = f"{long}[0-9]{{3}}", [long + "x", long + "y"]
    asked: list[Any] = [{"choice": choice}, {"regex": regex}, {"json": {"const": long}}]
    requests = [
        Request([5, 6], SamplingParams(max_new_tokens=900, temperature=1.0, seed=4, structured_outputs=one))
        for one in asked
    ]
    plain = outputs("none", requests, 1000)
    assert max(len(one.text) for one in plain) > 1300
    assert all(one.valid for one in plain)
    for drafter in ("forced", "ngram"):
        assert tokens_of(outputs(drafter, requests, 1000)) == tokens_of(plain)


def decoded(drafter: str, temperature: float, prompts: int) -> list[Generation]:
    """An output for each schema and prompt, schema after schema."""
    requests = []
    for schema, index in product(SCHEMAS.values(), range(prompts)):
        prompt = tokenizer().encode(f"Question: Anna has {index + 2} apples and {3 * index} pears. Write a record.\n")
        params = SamplingParams(
            max_new_tokens=100, temperature=temperature, seed=index, structured_outputs=StructuredOutputs(json=schema)
        )
        requests.append(Request(prompt, params))
    return outputs(drafter, requests)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_records_of_the_embedded_model_are_valid_and_the_same_with_every_drafter(
    temperature: float,
) -> None:
    prompts = 2
    plain = decoded("none", temperature, prompts)
    schemas = [schema for schema in SCHEMAS.values() for _ in range(prompts)]
    finished = [(schema, one) for schema, one in zip(schemas, plain, strict=True) if one.finish_reason == "stop"]
    assert len(finished) > len(plain) / 3
    assert [(schema, one.text) for schema, one in finished if problems(schema, one.text)] == []
    for drafter in DRAFTERS:
        found = decoded(drafter, temperature, prompts)
        assert tokens_of(found) == tokens_of(plain), drafter
