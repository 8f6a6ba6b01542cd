"""Encodes chat messages as tokens. Only special tokens that the template itself writes become such: `<|end|>` in a
message is text."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from drafter.errors import RequestError, one_line, shown
from drafter.text.tokenizers import bounded_template, longest_token, refuse_endless, refuse_panics, tokenise

_ROLE = re.compile(r"[\w.-]+")
_HARMLESS = "x"  # replaces a special token's text where a chat is encoded without it
_MOST_SPELLED = 1000
"""Limit of special tokens' texts in a chat's messages. Each is encoded separately, in a tenth of a millisecond."""
_NO_CHARACTER = "\U0010ffff"  # a code point that will never be a character: no vocabulary has it
_CLOCK = "strftime_now"
"""Function by which a chat template reads the clock, as Llama 3.2's and Granite's do for today's date."""
_SET_CLOCK = (
    "{% macro strftime_now(format) %}{% set set_clock = namespace(text=format) %}"
    "{% for code, value in clock_codes.items() %}{% set set_clock.text = set_clock.text.replace(code, value) %}"
    "{% endfor %}{{ set_clock.text }}{% endmacro %}\n"
)
"""Precedes a template and hides the function of that name. In Jinja, as transformers passes a template no function."""


@dataclass(frozen=True)
class Chat:
    """Messages, and the chat template's text of them up to the assistant's answer; `now` is what its clock shows."""

    messages: Sequence[dict[str, Any]]
    text: str
    now: datetime | None = None


def render_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], now: datetime | None = None) -> Chat:
    """Apply the tokeniser's chat template. A template that reads the clock gets `now`, by default the present time."""
    for place, message in enumerate(messages, start=1):
        role = message.get("role")
        # Templates put roles into the names of special tokens.
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise RequestError(f"message {place} has the role {role!r}: a role is one word")
    messages = [{**message, "content": _said(message, place)} for place, message in enumerate(messages, start=1)]
    now = now or datetime.now()
    try:
        settings = {"tokenize": False, "add_generation_prompt": True, **_clock(tokenizer, now)}
        with bounded_template():
            text = str(tokenizer.apply_chat_template(messages, **settings))
    except Exception as error:  # A template comes with the model and may raise anything.
        raise RequestError(f"the chat template does not take these messages: {one_line(error)}") from error
    return Chat(messages, text, now)


def _said(message: dict[str, Any], place: int) -> str:
    """Return the text of a message: its parts of type `text` become lines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise RequestError(f"content of message {place} must be text or a list of typed parts, not {shown(content)}")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"message {place} has a part of type {part.get('type')!r}: only parts of text are read")
    return "\n".join(part["text"] for part in content)


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the chat template may write the date or the time."""
    template = tokenizer.chat_template
    return any(_CLOCK in one for one in (template.values() if isinstance(template, dict) else [template or ""]))


def _clock(tokenizer: Any, now: datetime) -> dict[str, Any]:
    """Return arguments of `apply_chat_template` that set the clock of a template that reads it."""
    if not reads_clock(tokenizer):
        return {}
    return {"chat_template": _SET_CLOCK + tokenizer.get_chat_template(), "clock_codes": _written(now)}


@lru_cache(maxsize=2)
def _written(now: datetime) -> dict[str, str]:
    codes = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
    return {"%%": "\0"} | {code: now.strftime(code) for code in codes} | {"\0": "%"}


def encode_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    special_tokens: bool = False,
    max_length: float = math.inf,
    now: datetime | None = None,
) -> list[int]:
    """Return the tokens of one chat, or raise `RequestError`; see `render_chat` and `encode_chats`."""
    chat = render_chat(tokenizer, messages, now)
    refuse_endless(chat.text, max_length, longest_token(tokenizer))
    (found,) = encode_chats(tokenizer, [chat], special_tokens=special_tokens)
    if isinstance(found, RequestError):
        raise found
    return found


def encode_chats(
    tokenizer: Any, chats: Sequence[Chat], *, special_tokens: bool = False
) -> list[list[int] | RequestError]:
    """Return the tokens of each chat, or the error.

    Where no message has the text of a special token, these are the tokens of `apply_chat_template`. With
    `special_tokens`, such a text becomes the token. Otherwise it is text, or an error if the tokeniser cannot encode it
    as such.
    """
    if not chats:
        return []
    # The template has also written the special tokens that begin a text.
    try:
        encoded = tokenise(tokenizer, [chat.text for chat in chats], add_special_tokens=False)
    except RequestError as error:
        if len(chats) == 1:
            return [error]
        return [one for chat in chats for one in encode_chats(tokenizer, [chat], special_tokens=special_tokens)]
    if special_tokens:
        return list(encoded["input_ids"])
    return [
        _safe(tokenizer, chat, ids, _texts_of_added_tokens(tokenizer, encoded, place, chat.text))
        for place, (chat, ids) in enumerate(zip(chats, encoded["input_ids"], strict=True))
    ]


def _safe(tokenizer: Any, chat: Chat, ids: list[int], texts: set[str]) -> list[int] | RequestError:
    """Return the tokens of a chat in which no special token comes from a message, or the error.

    `texts` became special tokens in `ids`. A normaliser may make one of a text that is not the token's own.
    """
    said: list[str] = []
    _with_texts(list(chat.messages), said.append)
    inside = {text for text in texts if any(text in one for one in said)}
    if not inside and not any(_ends_in_beginning(one, texts) for one in said):
        return ids
    count = sum(one.count(text) for text in inside for one in said)
    if count > _MOST_SPELLED:
        return RequestError(
            f"the messages have texts of special tokens, such as {min(inside)!r}, in {count} places: up to "
            f"{_MOST_SPELLED} are taken as text; leave them out, or set special_tokens to have them count as the tokens"
        )
    what = " and ".join(map(repr, sorted(inside))) or "the parts of one"
    refusal = RequestError(
        f"a message has the text of a special token of the model ({what}), which its tokeniser cannot take as text: "
        "leave it out, or set special_tokens to have it count as the token"
    )
    try:
        if inside:
            settings = {"add_generation_prompt": True, "sanitize_control_tokens": True, "return_dict": False}
            settings |= _clock(tokenizer, chat.now or datetime.now())
            with refuse_panics():
                ids = list(tokenizer.apply_chat_template(list(chat.messages), **settings))
        # Check that the template alone writes the same special tokens.
        without = render_chat(tokenizer, _with_texts(list(chat.messages), partial(_harmless, texts)), chat.now).text
        (proper,) = tokenise(tokenizer, [without], add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenisers raise various errors here
        refusal.__cause__ = error
        return refusal
    special = _added_tokens(tokenizer)
    return ids if [t for t in ids if special.get(t)] == [t for t in proper if special.get(t)] else refusal


def _texts_of_added_tokens(tokenizer: Any, encoded: Any, place: int, text: str) -> set[str]:
    """Return the texts, as they stand in `text`, that became added tokens."""
    added = _added_tokens(tokenizer)
    places = [index for index, token in enumerate(encoded["input_ids"][place]) if token in added]
    if encoded.encodings is None:  # a tokeniser in Python does not say where in the text a token is
        return set(tokenizer.convert_ids_to_tokens([encoded["input_ids"][place][index] for index in places]))
    spans = (encoded.token_to_chars(place, index) for index in places)
    return {text[span.start : span.end].strip() for span in spans if span is not None} - {""}


@lru_cache(maxsize=2)
def _added_tokens(tokenizer: Any) -> dict[int, bool]:
    """Return the ids of added tokens, matched before the tokeniser's model runs, and whether each is special.

    The unknown token is excluded: any word may become it.
    """
    unknown = tokenizer(_NO_CHARACTER, add_special_tokens=False)["input_ids"]
    return {token: entry.special for token, entry in tokenizer.added_tokens_decoder.items() if token not in unknown}


def _with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return messages in which every text, at any depth, is replaced by `change` of it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _with_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(one, change) for one in value]
    return value


def _harmless(texts: set[str], said: str) -> str:
    """Return `said` so that it neither contains one of the texts nor joins to one."""
    for text in sorted(texts, key=len, reverse=True):
        said = said.replace(text, _HARMLESS)
    return said + _HARMLESS if _ends_in_beginning(said, texts) else said


def _ends_in_beginning(said: str, texts: set[str]) -> bool:
    """Return whether `said` ends with the beginning of one of the texts, which following text may complete."""
    return any(said.endswith(text[:length]) for text in texts for length in range(1, len(text)))
