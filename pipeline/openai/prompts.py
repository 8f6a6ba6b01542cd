"""What is to be continued: the messages of a chat, and the prompts of a text completion."""

from __future__ import annotations

from typing import Any

from pipeline.openai.api_error import bad_request, clipped, missing, shown
from pipeline.openai.parsed_request import Messages, Prompt

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles as a chat template knows them; `developer` is OpenAI's newer name for `system`."""
_MESSAGE_FIELDS = {"role", "content", "name"}
MOST_MESSAGES = 2048
"""Messages of a chat. Each becomes several tokens, however empty it is."""
_TOKENS = 2**31
"""Token ids are below this."""


def chat_messages(messages: Any) -> Messages:
    """Return messages as a chat template takes them: known roles, contents of text.

    Raises:
        OpenAIError: They are no list of messages, or too many; or one has a field, a role or a content that is not
            supported.
    """
    if not isinstance(messages, list):
        message = f"Invalid 'messages': it must be a list of messages, not {shown(messages)}."
        raise bad_request(message, "messages", "invalid_type")
    if not 1 <= len(messages) <= MOST_MESSAGES:
        message = (
            f"Invalid 'messages': it must have at least 1 and at most {MOST_MESSAGES} messages, not {len(messages)}."
        )
        raise bad_request(message, "messages", "invalid_value")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"Invalid '{path}': it must be an object, not {shown(message)}.", path, "invalid_type")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    for name in given:
        if name not in _MESSAGE_FIELDS:
            where = f"{path}.{clipped(name)}"
            raise bad_request(f"Unsupported parameter: '{where}' is not supported.", where, "unsupported_parameter")
    role, name = given.get("role"), given.get("name", "")
    if not isinstance(role, str) or role not in _ROLES:
        message_ = f"Invalid '{path}.role': it must be one of {', '.join(_ROLES)}, not {shown(role)}."
        raise bad_request(message_, f"{path}.role", "invalid_value")
    if not isinstance(name, str):
        raise bad_request(f"Invalid '{path}.name': it must be text.", f"{path}.name", "invalid_type")
    content = _text(given.get("content"), f"{path}.content")
    return {"role": _ROLES[role], "content": content, **({"name": name} if name else {})}


def _text(content: Any, path: str) -> str:
    """Return a message's content: text, or text parts, which become lines."""
    if isinstance(content, str):
        return content
    if content is None:
        raise missing(path)
    if not isinstance(content, list):
        message = f"Invalid '{path}': it must be text or a list of parts, not {shown(content)}."
        raise bad_request(message, path, "invalid_type")
    return "\n".join(_part(part, f"{path}[{place}]") for place, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        message = f"Unsupported value: '{path}' can only be a part of type \"text\", not {shown(kind)}."
        raise bad_request(message, path, "unsupported_value")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"Invalid '{path}.text': it must be text.", f"{path}.text", "invalid_type")
    return str(part["text"])


def completion_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a text completion: a text, texts, the token ids of one prompt, or those of several.

    Raises:
        OpenAIError: It is none of these.
    """
    if isinstance(value, str) or _is_tokens(value):
        return (value,)
    several = value if isinstance(value, list) else []
    if several and (all(isinstance(one, str) for one in several) or all(map(_is_tokens, several))):
        return tuple(several)
    message = f"Invalid 'prompt': it must be text, a list of texts, or (lists of) token ids, not {shown(value)}."
    raise bad_request(message, "prompt", "invalid_type")


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < _TOKENS for token in value)
    )
