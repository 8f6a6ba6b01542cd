"""What is asked of a chat template: messages, tools, documents and settings, in transformers' own words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from drafter.errors import RequestError, shown

_ROLE = re.compile(r"[\w.-]+")
TURN = ("add_generation_prompt", "continue_final_message")
NOT_FOR_TEMPLATES = frozenset(
    (
        *("self", "conversation", "tools", "documents", "chat_template", "tokenize", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "kwargs"),
    )
)
"""Other arguments of `apply_chat_template` than `TURN`. To import transformers takes seconds."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """What a chat template is asked for: arguments of transformers' `apply_chat_template`, by their names there.

    By default a last message of the assistant is continued, and after any other message an answer begins.

    Args:
        chat_template_kwargs: Settings that the template reads, such as `{"enable_thinking": False}`.

    Raises:
        RequestError: Something is not of the form that templates read.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.messages, list | tuple) or not self.messages:
            raise RequestError(f"messages must be a list of messages with role and content, not {shown(self.messages)}")
        for place, message in enumerate(self.messages, start=1):
            _check_message(message, f"message {place}")
        for name, value in (("tools", self.tools), ("documents", self.documents)):
            if not (value is None or are_objects(value)):
                raise RequestError(f"{name} must be a list of objects, not {shown(value)}")
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise RequestError(f"chat_template_kwargs must be an object, not {shown(self.chat_template_kwargs)}")
        for name in self.chat_template_kwargs or {}:
            if name in NOT_FOR_TEMPLATES:
                raise RequestError(f"chat_template_kwargs are what the template reads, which {name!r} is not")

    @property
    def image_parts(self) -> int:
        """Number of parts `{"type": "image"}`, whose images are beside the messages, in order."""
        contents = (message.get("content") for message in self.messages)
        return sum(
            part["type"] == "image" for content in contents if isinstance(content, list | tuple) for part in content
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template`."""
        turn = {name: getattr(self, name) for name in TURN if getattr(self, name) is not None}
        found = {**(self.chat_template_kwargs or {}), **turn}
        begins, continues = map(found.get, TURN)
        if continues is None:
            continues = begins is None and self.messages[-1]["role"] == "assistant"
        found |= {TURN[0]: not continues if begins is None else begins, TURN[1]: continues}
        # No parts are an empty text: templates that read texts would write the brackets. And where a list of calls is
        # empty, as tables have it in messages without any, many look for the first one.
        messages = [{**one, "content": ""} if one.get("content") in ([], ()) else dict(one) for one in self.messages]
        messages = [{name: one[name] for name in one if name != "tool_calls" or one[name]} for one in messages]
        return {"conversation": messages, "tools": self.tools, "documents": self.documents} | found


def are_objects(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a value is a list of objects, as messages, tools and parts of a content are."""
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} must be an object with role and content, not {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if role is None:
        raise RequestError(f"{name} has no role, but {shown([*message])}: a message is {{role, content}}")
    # Templates put roles into the names of special tokens.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{name} has the role {shown(role)}: a role is one word")
    if content is None:
        if not any(message.get(other) for other in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
            raise RequestError(f"{name} has no content")
    elif not isinstance(content, str):
        if not are_objects(content) or not all(isinstance(part.get("type"), str) for part in content):
            raise RequestError(f"content of {name} must be text or a list of typed parts, not {shown(content)}")
        for part in content:
            if part["type"] == "image" and len(part) == 1:
                continue
            if part["type"] not in ("text", "thinking") or not isinstance(part.get(part["type"]), str):
                raise RequestError(f"{name} has a part of type {part['type']!r}: only text and images are read")
