"""Whatever a guide lets end is valid by its schema: random outputs, and those of the embedded model."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from drafter.embedded import EMBEDDED_BASE
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
