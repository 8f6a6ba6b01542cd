"""What a body says that the output must be: OpenAI's `response_format`, and `structured_outputs`, which is vLLM's."""

from __future__ import annotations

import re
from typing import Any

from drafter.errors import RequestError
from drafter.structured_outputs import StructuredOutputs
from pipeline.openai.errors import (
    bad_request,
    can_only_be,
    checked_fields,
    checked_name,
    contradiction,
    invalid,
    missing,
)

OUTPUTS = {"json": object, "json_object": bool, "regex": str, "choice": list, "grammar": str}
"""Fields of `structured_outputs`, of which a body has one."""
FORMATS = ("text", "json_object", "json_schema")
_SCHEMA = {"name": str, "description": str, "schema": dict, "strict": bool}


def wanted_output(response_format: Any, structured_outputs: Any) -> StructuredOutputs | None:
    """Return what the output must be; None for any text.

    A schema is followed also if it is not `strict`; without a schema, any JSON object will do.

    Raises:
        OpenAIError: A field is not of its form, or both are given.
    """
    param = "response_format" if structured_outputs is None else "structured_outputs"
    if structured_outputs is not None and response_format is not None:
        raise contradiction("Set 'response_format' or 'structured_outputs', not both.", param)
    try:
        if structured_outputs is not None:
            return StructuredOutputs(**checked_fields(structured_outputs, OUTPUTS, param))
        return None if response_format is None else _by_format(response_format)
    except RequestError as error:
        message = re.sub(r"^structured_outputs\S*", "", str(error)).strip()
        raise bad_request(f"Invalid '{param}': it {message}.", param, "invalid_value") from error


def _by_format(response_format: Any) -> StructuredOutputs | None:
    path = "response_format"
    if not isinstance(response_format, dict):
        raise invalid(path, "be an object", response_format)
    kind = response_format.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise can_only_be(f"{path}.type", " or ".join(FORMATS), kind)
    fields = {"type": str} | {"json_schema": {"json_schema": dict}, "json_object": {"schema": dict}}.get(kind, {})
    given = checked_fields(response_format, fields, path)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's, which clients send to others, too
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)
    path = f"{path}.json_schema"
    if "json_schema" not in given:
        raise missing(path)
    asked = checked_fields(given["json_schema"], _SCHEMA, path)
    checked_name(asked, path)
    schema = asked.get("schema")
    return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)
