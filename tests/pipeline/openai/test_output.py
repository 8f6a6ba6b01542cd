"""What a body says that its output must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter.requests import SamplingParams
from drafter.structured_outputs import StructuredOutputs
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import parse_chat, parse_completion

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **more}


def by_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", **more}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": by_schema(schema=SCHEMA)}, {"json": SCHEMA}),
        ({"response_format": by_schema(schema=SCHEMA, strict=True, description="A point.")}, {"json": SCHEMA}),
        ({"response_format": by_schema(strict=None)}, {"json_object": True}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "[ab]+"}}, {"regex": "[ab]+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ],
)
def test_both_fields_say_what_the_output_must_be(body: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    expected = None if wanted is None else StructuredOutputs(**wanted)
    for parsed in (parse_chat(chat(**body)), parse_completion({"model": "m", "prompt": "x", **body})):
        assert parsed.settings.get("structured_outputs") == expected
        assert parsed.sampling(SamplingParams()).structured_outputs == expected


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"response_format": "json"}, "response_format", "invalid_type", 'an object, not "json"'),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value", "json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "unsupported_value", "json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "unknown_parameter", ""),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "invalid_type", "object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
            "",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
            "",
        ),
        (
            {"response_format": by_schema(name="a b", schema=SCHEMA)},
            "response_format.json_schema.name",
            "invalid_value",
            "64 letters",
        ),
        ({"response_format": by_schema(schema=[])}, "response_format.json_schema.schema", "invalid_type", "an object"),
        (
            {"response_format": by_schema(schema={"enum": ["x" * 200_000]})},
            "response_format",
            "invalid_value",
            "up to 120000 characters",
        ),
        ({"structured_outputs": "x"}, "structured_outputs", "invalid_type", "an object"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "it must have one of json, "),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "structured_outputs",
            "invalid_value",
            "json and regex",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_value", "it is not JSON"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "invalid_value", "JSON schema"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_type", "text"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "invalid_value", "list of texts"),
        ({"structured_outputs": {"calls": {}}}, "structured_outputs.calls", "unknown_parameter", ""),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "structured_outputs",
            "invalid_parameter_combination",
            "not both",
        ),
    ],
)
def test_what_cannot_be_understood_is_refused_by_its_place(
    body: dict[str, Any], param: str, code: str, words: str
) -> None:
    with pytest.raises(OpenAIError) as caught:
        parse_chat(chat(**body))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert words in caught.value.message
    assert "structured_outputs" not in caught.value.message or param.startswith("structured_outputs")


def test_what_the_engine_refuses_is_said_of_the_bodys_own_field() -> None:
    given = {"response_format": by_schema(schema=SCHEMA)}
    refusal = parse_chat(chat(**given)).unusable_output("structured_outputs.json cannot be used: why")
    assert refusal is not None
    assert (refusal.message, refusal.param) == (
        "Invalid 'response_format': cannot be used: why",
        "response_format",
    )
    assert parse_chat(chat(**given)).unusable_output("the prompt is too long") is None
    with pytest.raises(OpenAIError, match="ignore_eos") as caught:
        parse_chat(chat(**given, ignore_eos=True)).sampling(SamplingParams())
    assert caught.value.status == 400
