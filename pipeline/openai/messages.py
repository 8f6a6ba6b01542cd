"""Messages of a chat, in the form that chat templates read."""

from __future__ import annotations

from typing import Any

from pipeline.openai.errors import (
    OpenAIError,
    bad_request,
    can_only_be,
    checked_fields,
    clipped,
    invalid,
    missing,
    not_supported,
    parse_json,
)

MOST_MESSAGES = 2048
"""Messages of a chat. Each becomes several tokens, even if it is empty."""
_DETAILS = ("auto", "low", "high")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as a chat template knows them; `developer` is OpenAI's newer name for `system`."""
_OWN = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
"""Fields of messages of some roles. Templates write an earlier answer's reasoning, or leave it out."""


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a body, with known roles, and with arguments of tools as objects.

    Raises `OpenAIError` if a message is not of OpenAI's form, or has something else than text and a user's images.
    """
    if not isinstance(messages, list):
        raise invalid("messages", "be a list of messages", messages)
    if not 1 <= len(messages) <= MOST_MESSAGES:
        must = f"have at least 1 and at most {MOST_MESSAGES} messages"
        raise invalid("messages", must, len(messages), "invalid_value")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(path, "be an object", message)
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{path}.role", f"be one of {', '.join(_ROLES)}", role, "invalid_value")
    for name, value in given.items():
        if name not in ("role", "content", "name", *_OWN.get(role, ())):
            raise not_supported(f"{path}.{clipped(name)}")
        if name in ("name", "tool_call_id", "reasoning_content") and not isinstance(value, str):
            raise bad_request(f"Invalid '{path}.{name}': it must be text.", f"{path}.{name}", "invalid_type")
    given["role"] = _ROLES[role]
    if "reasoning_content" in given:  # an answer that was cut short before its text
        given.setdefault("content", "")
    if "tool_calls" not in given or "content" in given:
        given["content"] = _content(given.get("content"), f"{path}.content", images=role == "user")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"], f"{path}.tool_calls")
    return {name: value for name, value in given.items() if value != "" or name == "content"}


def _content(content: Any, path: str, *, images: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None:
        raise missing(path)
    if not isinstance(content, list):
        raise invalid(path, "be text or a list of parts", content)
    return [_part(part, f"{path}[{place}]", images=images) for place, part in enumerate(content)]


def _part(part: Any, path: str, *, images: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url" and images:
        return {"type": kind, kind: _image_url(part.get(kind), f"{path}.{kind}")}
    if kind != "text":
        raise can_only_be(path, 'a part of type "text"' + (' or "image_url"' if images else ""), kind)
    if not isinstance(part.get("text"), str):
        raise bad_request(f"Invalid '{path}.text': it must be text.", f"{path}.text", "invalid_type")
    return {"type": kind, "text": part["text"]}


def _image_url(value: Any, path: str) -> dict[str, str]:
    """Return an image's address; its `detail` has no effect, because the model's processor chooses the size."""
    given = checked_fields(value, {"url": str, "detail": str}, path)
    if "url" not in given:
        raise missing(f"{path}.url")
    if given.get("detail", "auto") not in _DETAILS:
        raise can_only_be(f"{path}.detail", ", ".join(_DETAILS), given["detail"])
    if not given["url"][:8].lower().startswith(("data:", "http://", "https://")):
        must = "be a data: URI, or an address of http or https"
        raise invalid(f"{path}.url", must, given["url"], "invalid_image_url")
    return {"url": given["url"]}


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(map(is_function, calls)):
        raise invalid(path, 'be a list of calls of type "function"', calls)
    return [call | {"function": _called(call["function"], f"{path}[{n}].function")} for n, call in enumerate(calls)]


def _called(function: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # OpenAI's are JSON text, and those of templates objects
        try:
            arguments = parse_json(arguments.encode()) if arguments.strip() else {}
        except OpenAIError:
            arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise invalid(path, "have a name, and arguments that are an object as JSON text", function)
    return {**function, "arguments": arguments}
