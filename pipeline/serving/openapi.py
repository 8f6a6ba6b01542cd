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


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, of which some are required."""
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def _closed(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of such an object without other properties."""
    return {**_object(*required, **properties), "additionalProperties": False}


def _list(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def _maybe(*kinds: str, **more: Any) -> dict[str, Any]:
    """Return the schema of a value that is null or of one of the JSON types `kinds`."""
    return {"type": [*kinds, "null"], **more}


_STRING = {"type": "string"}
_TEXT = _STRING | {"minLength": 1}
_NAME = _STRING | {"pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_NAMED = {"name": _NAME, "description": _maybe("string")}
_OF_FUNCTIONS = {"type": {"const": "function"}}
_OF_ASSISTANT = "Of the assistant's messages."

_IMAGE_URL = _closed("url", url=_STRING, detail={"enum": ["auto", "low", "high", None]})
_IMAGE_PART = _object("type", "image_url", type={"const": "image_url"}, image_url=_IMAGE_URL) | {
    "description": "In a user's message to a model that sees: a `data:` URI, or an address on a host that is listed."
}
_PARTS = _list({"anyOf": [_object("type", "text", type={"const": "text"}, text=_STRING), _IMAGE_PART]})
_CALL = _object("type", "function", **_OF_FUNCTIONS, function={"type": "object"})
_MESSAGE = _closed(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"anyOf": [_STRING, _PARTS, {"type": "null"}]},
    name=_maybe("string"),
    tool_calls=_maybe("array", items=_CALL, description=_OF_ASSISTANT),
    tool_call_id=_maybe("string", description="Of the role `tool`."),
    reasoning_content=_maybe("string", description=_OF_ASSISTANT),
)
_PARAMETERS = _maybe("object", properties={"type": {"const": "object"}})
_FUNCTION = _closed("name", **_NAMED, parameters=_PARAMETERS, strict=_maybe("boolean"))
_TOOLS = _list(_object("type", "function", **_OF_FUNCTIONS, function=_FUNCTION), maxItems=MOST_TOOLS)
_NAMED_TOOL = _object("type", "function", **_OF_FUNCTIONS, function=_object("name", name=_STRING))
_TOOL_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_TOOL]}
_SCHEMA = _closed("name", **_NAMED, schema=_maybe("object", description="The JSON schema."), strict=_maybe("boolean"))
_RESPONSE_FORMAT = {
    "anyOf": [
        _closed("type", type={"const": "text"}),
        _closed("type", type={"const": "json_object"}, schema=_maybe("object")),
        _closed("type", "json_schema", type={"const": "json_schema"}, json_schema=_SCHEMA),
    ]
}
_STRUCTURED_OUTPUTS = _closed(
    json=_maybe("object", "boolean", "string", description="A JSON schema, or its text."),
    json_object=_maybe("boolean"),
    regex=_maybe("string"),
    choice=_maybe("array", items=_TEXT, maxItems=MOST_CHOICES),
    grammar=_maybe("string", description="In Lark's notation."),
)
_PROMPT = {"anyOf": [_TEXT, _list(_TEXT, minItems=1), _list({"type": "integer", "minimum": 0}, minItems=1)]}
_STOP_TEXT = _TEXT | {"maxLength": LONGEST_STOP}
_STOP = {"anyOf": [_STOP_TEXT, _list(_STOP_TEXT, maxItems=MOST_STOPS)]}
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
        messages=_list(_MESSAGE, minItems=1, maxItems=MOST_MESSAGES),
        tools=_TOOLS,
        tool_choice=_TOOL_CHOICE,
        documents=_list({"type": "object"}),
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
        "content": {"text/event-stream": {"schema": _object("data", data=_STRING)}},
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
        "metadata": {"type": "object", "additionalProperties": _STRING},
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
