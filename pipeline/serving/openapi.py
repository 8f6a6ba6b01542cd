"""The OpenAPI description of each route, which clients and fuzzers are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Batch, Completion, FileObject, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from pipeline.openai.answers import FIELD
from pipeline.openai.messages import MOST_MESSAGES
from pipeline.openai.requests import Body, ChatBody, CompletionBody
from pipeline.progress.board import LearningReport
from pipeline.serving.config import LimitsConfig


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ModelList(BaseModel):
    object: str
    data: list[Model]


class FileList(BaseModel):
    object: str
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(BaseModel):
    object: str
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
    404: "There is no such model, file or batch.",
    408: "The request took too long.",
    409: "The batch has ended.",
    413: "The body is too large.",
    415: "The body is not of the right kind.",
    429: "There is no room for now.",
    503: "There is no replica that works, for now.",
    507: "The disk is full.",
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


FORM: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["purpose", "file"],
            "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
            "additionalProperties": False,
        }
    }
}
"""An upload."""
NEW_BATCH: dict[str, Any] = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["input_file_id", "endpoint", "completion_window"],
            "properties": {
                "input_file_id": {"type": "string"},
                "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions"]},
                "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,3}[hd]$"},
                "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
            },
            "additionalProperties": False,
        }
    }
}


def described(kind: type[BaseModel] | None, *statuses: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the document says of a route that answers with an object; None stands for a file's content."""
    if kind is None:
        success: dict[str, Any] = {"content": {"application/octet-stream": {}}, "description": "The content."}
    else:
        success = {"model": kind}
    asked = {} if body is None else {"openapi_extra": {"requestBody": {"required": True, "content": body}}}
    return {"responses": {200: success, **_errors(*statuses)}, **asked}


_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": {}},
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = [{"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _TOKEN_IDS)]
_PROMPT = {"anyOf": [_TEXT, _TOKEN_IDS, *_PROMPTS]}


def chat(models: Sequence[str], limits: LimitsConfig) -> dict[str, Any]:
    return _generation(ChatCompletion, _body(ChatBody, models, limits, messages=_MESSAGES))


def completions(models: Sequence[str], limits: LimitsConfig) -> dict[str, Any]:
    return _generation(Completion, _body(CompletionBody, models, limits, prompt=_PROMPT))


def _generation(kind: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    success = {
        "model": kind,
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"text/event-stream": {"schema": event}},
    }
    content = {"required": True, "content": {"application/json": {"schema": body}}}
    return {
        "responses": {200: success, **_errors(400, 401, 404, 408, 413, 415, 429, 503)},
        "openapi_extra": {"requestBody": content},
    }


def _body(kind: type[Body], models: Sequence[str], limits: LimitsConfig, **properties: Any) -> dict[str, Any]:
    """Pydantic's schema of a request's body; what is inside of objects and lists, the endpoint checks by itself."""
    schema = kind.model_json_schema()
    given: dict[str, Any] = schema["properties"] | properties
    given |= {
        "model": {"enum": list(models)},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.choices},
        "stream_options": schema.pop("$defs")["StreamOptions"],
        FIELD: {"type": "boolean", "description": "Say what became of the draft."},
    }
    schema["properties"] = {
        # A property that is null is not set.
        name: value if name in schema["required"] else {"anyOf": [value, {"type": "null"}]}
        for name, value in given.items()
    }
    return schema
