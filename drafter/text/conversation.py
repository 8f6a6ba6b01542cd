"""What is asked of a chat template: messages, tools, documents and settings, in transformers' own words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafter.errors import RequestError, shown

_ROLE = re.compile(r"[\w.-]+")
TURN = ("add_generation_prompt", "continue_final_message")
_NOT_FOR_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - set(TURN)

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
        if not _are_objects(self.messages) or not self.messages:
            raise RequestError(f"messages must be a list of objects with role and content, not {shown(self.messages)}")
        for place, message in enumerate(self.messages, start=1):
            _check_message(message, f"message {place}")
        for name in ("tools", "documents"):
            if not _are_objects(getattr(self, name) or []):
                raise RequestError(f"{name} must be a list of objects, not {shown(getattr(self, name))}")
        if not isinstance(self.chat_template_kwargs or {}, Mapping):
            raise RequestError(f"chat_template_kwargs must be an object, not {shown(self.chat_template_kwargs)}")
        for name in self.chat_template_kwargs or {}:
            if name in _NOT_FOR_TEMPLATES:
                raise RequestError(f"chat_template_kwargs are read by the template, and {name!r} is not")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template`."""
        turn = {name: getattr(self, name) for name in TURN if getattr(self, name) is not None}
        found = {**(self.chat_template_kwargs or {}), **turn}
        begins, continues = map(found.get, TURN)
        if continues is None:
            continues = begins is None and self.messages[-1]["role"] == "assistant"
        found |= {TURN[0]: not continues if begins is None else begins, TURN[1]: continues}
        messages = [dict(message) for message in self.messages]
        return {"conversation": messages, "tools": self.tools, "documents": self.documents} | found


def _are_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def _check_message(message: Mapping[str, Any], name: str) -> None:
    role, content = message.get("role"), message.get("content")
    # Templates put roles into the names of special tokens.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{name} has the role {role!r}: a role is one word")
    if content is None:
        if not any(message.get(other) for other in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
            raise RequestError(f"{name} has no content")
    elif not isinstance(content, str):
        if not _are_objects(content) or not all(isinstance(part.get("type"), str) for part in content):
            raise RequestError(f"content of {name} must be text or a list of typed parts, not {shown(content)}")
        for part in content:
            if part["type"] not in ("text", "thinking") or not isinstance(part.get(part["type"]), str):
                raise RequestError(f"{name} has a part of type {part['type']!r}: only parts of text are read")
