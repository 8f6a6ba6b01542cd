"""The OpenAPI description of each route, which clients and fuzzers are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from drafter.requests import LONGEST_STOP
from drafter.structured_outputs import MOST_CHOICES
from pipeline.openai.answers import FIELD
from pipeline.openai.messages import MOST_MESSAGES
from pipeline.openai.requests import MOST_BIASES, MOST_STOPS, Body, ChatBody, CompletionBody
from pipeline.openai.tools import MOST_TOOLS
from pipeline.progress.board import LearningReport
from pipeline.serving.config import LimitsConfig


class ErrorDetail(BaseModel):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ModelList(BaseModel):
    """The list of all models."""

    object: str
    data: list[Model]


class OpenConnections(BaseModel):
    """Number of open connections, and of those on which an answer waits for its client to read."""

    open: int
    unread: int


class Health(BaseModel):
    """Number of replicas of each model, and of connections where the ingress itself listens."""

    status: str
    replicas: dict[str, int]
    connections: OpenConnections | None


_MEANING = {
    400: "The request cannot be used.",
    401: "There is no such key.",
    403: "The key is no operator's.",
    404: "There is no such model.",
    408: "The request took too long.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "There is no room for now.",
    503: "There is no replica that works, for now.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": ErrorBody, "description": _MEANING[status]}
        | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})
        for status in statuses
    }


MODELS: dict[str, Any] = {"responses": {200: {"model": ModelList}, **_errors(401)}}
MODEL: dict[str, Any] = {"responses": {200: {"model": Model}, **_errors(401, 404), "4XX": {"model": ErrorBody}}}
HEALTH: dict[str, Any] = {"responses": {200: {"model": Health}, **_errors(503)}}
METRICS: dict[str, Any] = {"response_class": PlainTextResponse, "responses": _errors(401, 403)}
LEARNING: dict[str, Any] = {"responses": {200: {"model": LearningReport}, **_errors(401, 403, 503)}}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}, "detail": {"enum": ["auto", "low", "high", None]}},
            "required": ["url"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "image_url"],
    "description": "In a user's message to a model that sees: a `data:` URI, or an address on a host that is listed.",
}
_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": {"type": "object"}},
    "required": ["type", "function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": _TOOL, "description": "Of the assistant's messages."},
        "tool_call_id": {"type": ["string", "null"], "description": "Of the role `tool`."},
        "reasoning_content": {"type": ["string", "null"], "description": "Of the assistant's messages."},
    },
    "required": ["role"],
    "additionalProperties": False,
}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_OPTIONAL_TEXT = {"type": ["string", "null"]}
_STRICT = {"type": ["boolean", "null"]}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "description": _OPTIONAL_TEXT,
        "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
        "strict": _STRICT,
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOLS = {
    "type": "array",
    "maxItems": MOST_TOOLS,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "required": ["type", "function"],
    },
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "description": _OPTIONAL_TEXT,
        "schema": {"type": ["object", "null"], "description": "The JSON schema."},
        "strict": _STRICT,
    },
    "required": ["name"],
    "additionalProperties": False,
}
_RESPONSE_FORMAT = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "text"}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": {"type": ["object", "null"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": _SCHEMA},
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
    ]
}
_STRUCTURED_OUTPUTS = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "boolean", "string", "null"], "description": "A JSON schema, or its text."},
        "json_object": {"type": ["boolean", "null"]},
        "regex": _OPTIONAL_TEXT,
        "choice": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "maxItems": MOST_CHOICES},
        "grammar": _OPTIONAL_TEXT | {"description": "In Lark's notation."},
    },
    "additionalProperties": False,
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES}
_METADATA = {"type": "object", "additionalProperties": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _TOKENS]}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STOP_TEXT = _TEXT | {"maxLength": LONGEST_STOP}
_STOP = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MOST_STOPS}]}
_LOGIT_BIAS = {
    "type": "object",
    "maxProperties": MOST_BIASES,
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def chat(models: Sequence[str], limits: LimitsConfig) -> dict[str, Any]:
    """Return the description of `/v1/chat/completions`."""
    body = _body(
        ChatBody,
        models,
        limits,
        messages=_MESSAGES,
        tools=_TOOLS,
        tool_choice=_TOOL_CHOICE,
        documents=_OBJECTS,
        chat_template_kwargs={"type": "object"},
    )
    body["not"] = {
        "required": ["max_tokens", "max_completion_tokens"],
        "properties": {name: {"type": "integer"} for name in ("max_tokens", "max_completion_tokens")},
    }
    body["allOf"].append(_needs("top_logprobs", "integer", "logprobs"))
    return _generation(ChatCompletion, body)


def completions(models: Sequence[str], limits: LimitsConfig) -> dict[str, Any]:
    """Return the description of `/v1/completions`."""
    body = _body(CompletionBody, models, limits, prompt=_PROMPT)
    both = ("echo", "stream")
    body["not"] = {"required": list(both), "properties": {name: {"const": True} for name in both}}
    return _generation(Completion, body)


def _generation(kind: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    success = {
        "model": kind,
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
    content = {"required": True, "content": {"application/json": {"schema": body}}}
    return {
        "responses": {200: success, **_errors(400, 401, 404, 408, 413, 415, 429, 503)},
        "openapi_extra": {"requestBody": content},
    }


def _body(
    kind: type[Body], models: Sequence[str], limits: LimitsConfig, **properties: dict[str, Any]
) -> dict[str, Any]:
    """Pydantic's schema of a request's body, with `properties` and other rules that are checked elsewhere."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs")
    given: dict[str, Any] = schema["properties"] | properties
    given |= {
        "model": {"enum": list(models)},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.choices},
        "stop": _STOP,
        "logit_bias": _LOGIT_BIAS,
        "response_format": _RESPONSE_FORMAT,
        "structured_outputs": _STRUCTURED_OUTPUTS,
        "metadata": _METADATA,
        "stream_options": definitions["StreamOptions"],
        FIELD: {"type": "boolean", "description": "Say what became of the draft."},
    }
    required = schema["required"]
    schema["properties"] = {
        # A property that is null is not set.
        name: value if name in required or _may_be_null(value) else {"anyOf": [value, {"type": "null"}]}
        for name, value in given.items()
    }
    return schema | {"allOf": [_needs("stream_options", "object", "stream")]}


def _may_be_null(value: dict[str, Any]) -> bool:
    kinds = [value, *value.get("anyOf", ())]
    return any("null" in kind.get("type", ()) for kind in kinds)


def _needs(name: str, kind: str, other: str) -> dict[str, Any]:
    """Schema by which property `name`, of JSON type `kind`, may be set only where `other` is true."""
    return {
        "if": {"required": [name], "properties": {name: {"type": kind}}},
        "then": {"required": [other], "properties": {other: {"const": True}}},
    }
