"""Tools in chats for templates that read none: a message tells of them, and calls and results are texts of messages.

The form of calls is that of most models which were taught one; an output is held to it as to any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drafter.calls import CallForm
from drafter.text.conversation import Conversation
from pipeline.openai.errors import to_json

FORM = CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""Hermes', which Qwen and others have, too."""
_RESULT = ("<tool_response>", "</tool_response>")
_TELLS = """\
You may call functions. Each of these lines describes one:
{functions}

This is how to write a call of the function NAME, with a JSON object by its parameters as ARGUMENTS:
{example}
{when} The next message then has what it returned, between <tool_response> and </tool_response>."""
_WHEN = {True: "Answer with a call.", False: "Call where that helps to answer, and otherwise answer in plain text."}

Message = dict[str, Any]


def is_told(chat: Conversation) -> bool:
    """Return whether a chat has tools, calls or results of calls."""
    return bool(chat.tools) or any(one["role"] == "tool" or one.get("tool_calls") for one in chat.messages)


def told(chat: Conversation, *, needed: bool, system: bool) -> Conversation:
    """Return a chat with all of these in its messages' texts.

    Args:
        needed: There must be a call.
        system: The template takes a message of the system; otherwise the user's first one tells of the tools.
    """
    messages, before = list[Message](), False
    for message in chat.messages:
        changed, of_calls = _as_text(message)
        # Many templates want turns to alternate, as they do with calls and results in forms of their own.
        if messages and (of_calls or before) and messages[-1]["role"] == changed["role"]:
            changed = changed | {"content": _joined(messages.pop()["content"], changed["content"])}
        messages.append(changed)
        before = of_calls
    if chat.tools:
        text = _TELLS.format(
            functions="\n".join(to_json(tool["function"]) for tool in chat.tools),
            example=_written(['{"name": "NAME", "arguments": ARGUMENTS}']),
            when=_WHEN[needed],
        )
        role = "system" if system else "user"
        if messages[0]["role"] != role:
            messages.insert(0, {"role": role, "content": ""})
        said = messages[0]["content"]
        content = _joined(said, text, "\n\n") if system else _joined(text, said, "\n\n")
        messages[0] = messages[0] | {"content": content}
    return replace(chat, messages=messages, tools=None)


def _as_text(message: Mapping[str, Any]) -> tuple[Message, bool]:
    """Return a message with calls and results as text, and whether it has such."""
    if message["role"] == "tool":
        before, after = _RESULT
        content = _joined(_joined(before, message.get("content") or ""), after)
        return {"role": "user", "content": content}, True
    if calls := message.get("tool_calls"):
        called = [one["function"] for one in calls]
        # As an output has it.
        texts = [FORM.head(one["name"]) + json.dumps(one["arguments"], ensure_ascii=False) + "}" for one in called]
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return others | {"content": _joined(message.get("content") or "", _written(texts))}, True
    return dict(message), False


def _written(calls: Sequence[str]) -> str:
    return FORM.marker + FORM.first + (FORM.between or "").join(calls) + FORM.last


def _joined(first: Any, second: Any, between: str = "\n") -> Any:
    """Return two contents as one: as parts, if one of them has parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in (first, second)]
    return [*parts[0], *parts[1]]
