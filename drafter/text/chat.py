"""Encodes chats as tokens: those of transformers' `apply_chat_template`, except that what is said cannot write special
tokens. Only those that the template itself writes become such: `<|end|>` in a message is text."""

from __future__ import annotations

import copy
import json
import math
import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any

from drafter.errors import RequestError, one_line
from drafter.salted import salted_cache
from drafter.text.conversation import TURN, Conversation, Messages
from drafter.text.sandbox import bounded_template
from drafter.text.tokenizers import forget_words, longest_token, refuse_endless, refuse_panics, tokenise, tokenise_each

_WORDS = re.compile(r"[\w.:/ +-]*")  # a name, a number or a kind, which a template may compare and cannot be a token
_NO_WORD = re.compile(r"[^\w\s/]", re.ASCII)
_HARMLESS = "x"
_WHOLE = "whole part"  # key of a part that appears only where a template writes a part as it is
_MOST_SPELLED = 1000
"""Limit of special tokens' texts in a chat's messages. Each is encoded separately, in a tenth of a millisecond."""
_SPELLING = threading.Lock()  # for the copy of a tokeniser that spells special tokens
_NO_CHARACTER = "\U0010ffff"  # a code point that will never be a character: no vocabulary has it
_SOME_TIME = datetime(2000, 1, 1)
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
    """A chat template's text of a conversation, and what it was made of.

    Args:
        arguments: Those of `apply_chat_template`, with the messages in the form that the template reads.
        now: What the template's clock shows.
        written: The control tokens that the template writes around messages of other texts; None if it takes no others.
    """

    text: str
    arguments: dict[str, Any]
    template: str
    now: datetime
    written: tuple[int, ...] | None


def render_chat(tokenizer: Any, asked: Conversation | Messages, now: datetime | None = None) -> Chat:
    """Apply the tokeniser's chat template; `RequestError` if it takes no such messages, or leaves out what one says.

    A text is given as a part where the template reads parts, and parts of text as a text where it reads texts. A
    template that reads the clock gets `now`, by default the present time. What is found out about the form of the
    messages is kept for others of the same salt.
    """
    asked = asked if isinstance(asked, Conversation) else Conversation(asked)
    now = now or datetime.now()
    try:
        template = str(tokenizer.get_chat_template(None, asked.tools))
        refuse_unread(tokenizer, template, asked)
        arguments = asked.arguments()
        form, written, lost = _reading(tokenizer, template, _shape(arguments))
        if lost is not None:
            raise RequestError(lost)
        arguments["conversation"] = _in_form(arguments["conversation"], form)
        text = _render(tokenizer, template, arguments, now)
    except Exception as error:  # A template comes with the model and may raise anything.
        raise RequestError(f"the chat template does not take these messages: {one_line(error)}") from error
    return Chat(text, arguments, template, now, written)


def _render(tokenizer: Any, template: str, arguments: dict[str, Any], now: datetime, **settings: Any) -> Any:
    settings = {"chat_template": template, "tokenize": False} | settings
    if _CLOCK in template:
        settings |= {"chat_template": _SET_CLOCK + template, "clock_codes": _written(now)}
    with bounded_template():
        return tokenizer.apply_chat_template(**arguments, **settings)


def refuse_unread(tokenizer: Any, template: str, asked: Conversation) -> None:
    """Raise `RequestError` if a template names nowhere what it is given: it would have no effect."""
    names = [name for name in ("tools", "documents") if getattr(asked, name)]
    names += [name for name in asked.chat_template_kwargs or {} if name not in TURN]
    for name in names:
        if name in tokenizer.special_tokens_map or not names_in(template, name):
            raise RequestError(f"it reads no {name}, which would have no effect: leave it out")


def names_in(template: str, name: str) -> bool:
    """Return whether a template has a name: otherwise it does not read what is given by it."""
    return name in _names(template)


@lru_cache(maxsize=8)
def _names(template: str) -> frozenset[str]:
    """Return all words of a template. Python keeps regular expressions that are made of names, for all salts."""
    return frozenset(re.findall(r"\w+", template))


@lru_cache(maxsize=4)
def takes_system(tokenizer: Any) -> bool:
    """Return whether the tokeniser's chat template takes a message of the system, and writes what it says."""
    asked = [{"role": role, "content": _HARMLESS} for role in ("system", "user")]
    try:
        render_chat(tokenizer, asked, _SOME_TIME)
    except RequestError:
        return False
    return True


# How a template reads messages is found out with marks in the places of what they say, once for each shape of a chat.


def _shape(arguments: dict[str, Any]) -> str:
    """Return, as JSON, arguments in which marks stand for what messages say, and all else is harmless."""
    plain = _with_texts(arguments, lambda said: said if _WORDS.fullmatch(said) else _HARMLESS)
    for place, given in enumerate(arguments["conversation"]):
        content = given.get("content")
        if isinstance(content, str):
            plain["conversation"][place]["content"] = _mark(content, place, 0)
        for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if part["type"] != "image":
                plain["conversation"][place]["content"][index] |= {
                    part["type"]: _mark(part[part["type"]], place, index)
                }
    return json.dumps(plain, default=str)


def _mark(said: str, place: int, index: int) -> str:
    return f"x{place}x{index}x" if said.strip() else said


@salted_cache(64)
def _reading(tokenizer: Any, template: str, shape: str) -> tuple[str, tuple[int, ...] | None, str | None]:
    """Return the form of messages that a template reads, the control tokens that it writes, and what it leaves out."""
    arguments = json.loads(shape)
    messages, lost = arguments["conversation"], None
    # Many templates write calls alone, so that texts beside them count only while a form may have them.
    for alone, form in product((False, True), ("given", "text", "parts")):
        arguments["conversation"] = _in_form(messages, form, {_WHOLE: ""})
        if form != "given" and arguments["conversation"] == messages:
            continue
        try:
            text = _render(tokenizer, template, arguments, _SOME_TIME)
            ids = _control_ids(tokenizer, template, text)
        except RequestError:
            raise
        except Exception:  # another form is right, or it happens again with the messages themselves
            continue
        place = _lost(arguments["conversation"], text.lower(), alone=alone)
        if place is None and "tool_calls" not in template and any(one.get("tool_calls") for one in messages):
            arguments["conversation"] = [{**one, "tool_calls": None} for one in arguments["conversation"]]
            if _render(tokenizer, template, arguments, _SOME_TIME) == text:
                return form, None, "it reads no tool_calls, which would have no effect: leave them out"
        if place is None:
            return form, ids, None
        if alone and lost is None:
            lost = f"what message {place + 1} says, of the role {messages[place]['role']!r}, is not in the prompt"
    return "given", None, lost


def _in_form(messages: list[dict[str, Any]], form: str, more: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return messages with contents as they are, as text, or as parts (which have `more`)."""

    def changed(content: Any) -> Any:
        if content is None:
            return {"given": None, "text": "", "parts": []}[form]
        if isinstance(content, str):
            return [{"type": "text", "text": content, **(more or {})}] if form == "parts" else content
        if form == "text" and (text := joined_texts(content)) is not None:
            return text
        return [{**(more or {}), **part} for part in content]  # first: a message that is continued ends with its text

    return [{**message, "content": changed(message.get("content"))} for message in messages]


def joined_texts(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a content's parts as one text, as templates that take no parts get it; None if some are no texts."""
    texts = [part["text"] for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(parts) else None


def _lost(messages: list[dict[str, Any]], text: str, *, alone: bool) -> int | None:
    """Return the place of the first message whose marks are not in `text`, or whose parts are not read as such.

    Calls may stand `alone`, without what their message says.
    """
    for place, message in enumerate(messages):
        content = message.get("content") or ""
        said = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        may_go = alone and message["role"] == "assistant" and message.get("tool_calls")
        is_gone = not may_go and any(one.strip() not in text for one in said)
        if is_gone or (said and content is not said[0] and _WHOLE in text):
            return place
    return None


# Control tokens: those that only the template may write.


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: Any, template: str) -> dict[int, str]:
    """Return the texts of special tokens, and of other added tokens that delimit a user's message, by id.

    The unknown token is excluded: any word may become it.
    """
    unknown = tokenizer(_NO_CHARACTER, add_special_tokens=False)["input_ids"]
    added = {token: entry for token, entry in tokenizer.added_tokens_decoder.items() if token not in unknown}
    named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    try:
        text = _render(tokenizer, template, {"conversation": [{"role": "user", "content": _HARMLESS}]}, _SOME_TIME)
        turn = set(tokenise(tokenizer, [text], add_special_tokens=False)["input_ids"][0])
    except Exception:  # a template that takes no such message alone
        turn = set()
    return {
        token: entry.content
        for token, entry in added.items()
        if entry.special or entry.content in named or (token in turn and not entry.content.isspace())
    }


def _control_ids(tokenizer: Any, template: str, text: str) -> tuple[int, ...]:
    (ids,) = tokenise(tokenizer, [text], add_special_tokens=False)["input_ids"]
    return tuple(token for token in ids if token in _control_tokens(tokenizer, template))


def encode_chat(
    tokenizer: Any,
    asked: Conversation | Messages,
    *,
    special_tokens: bool = False,
    max_length: float = math.inf,
    now: datetime | None = None,
) -> list[int]:
    """Return the tokens of one chat, or raise `RequestError`; see `render_chat` and `encode_chats`."""
    chat = render_chat(tokenizer, asked, now)
    return tokens_of(tokenizer, chat, special_tokens=special_tokens, max_length=max_length)


def tokens_of(tokenizer: Any, chat: Chat, *, special_tokens: bool = False, max_length: float = math.inf) -> list[int]:
    """Return the tokens of one chat, or raise `RequestError`; see `encode_chats`. What is too long is not tokenised."""
    refuse_endless(chat.text, max_length, longest_token(tokenizer))
    (found,) = encode_chats(tokenizer, [chat], special_tokens=special_tokens)
    if isinstance(found, RequestError):
        raise found
    return found


def encode_chats(
    tokenizer: Any, chats: Sequence[Chat], *, special_tokens: bool = False
) -> list[list[int] | RequestError]:
    """Return the tokens of each chat, or the error.

    Where no message has the text of a control token, these are the tokens of `apply_chat_template`. With
    `special_tokens`, such a text becomes the token. Otherwise it is text, or an error if the tokeniser cannot encode it
    as such.
    """
    # The template has also written the special tokens that begin a text.
    encoded = tokenise_each(tokenizer, [chat.text for chat in chats], add_special_tokens=False)
    if special_tokens:
        return encoded
    found = zip(chats, encoded, strict=True)
    return [ids if isinstance(ids, RequestError) else _safe(tokenizer, chat, ids) for chat, ids in found]


def _safe(tokenizer: Any, chat: Chat, ids: list[int]) -> list[int] | RequestError:
    """Return the tokens of a chat in which no control token comes from a message, or the error."""
    control = _control_tokens(tokenizer, chat.template)
    found = tuple(token for token in ids if token in control)
    said = _texts(chat.arguments)
    inside = [control[token] for token in set(found) if any(control[token] in one for one in said)]
    if found == chat.written and not inside:
        return ids
    count = sum(one.count(text) for text in inside for one in said)
    if count > _MOST_SPELLED:
        return RequestError(
            f"the messages have texts of special tokens, such as {min(inside)!r}, in {count} places: up to "
            f"{_MOST_SPELLED} are taken as text; leave them out, or set special_tokens to have them count as the tokens"
        )
    more = Counter(found) - Counter(chat.written or ())
    what = " and ".join(map(repr, sorted(inside or {control[token] for token in more})))
    refusal = RequestError(
        f"a message has the text of a special token of the model ({what}), or the template makes it of one, and it "
        "cannot be taken as text: leave it out, or set special_tokens to have it count as the token"
    )
    try:
        # What is said may decide what the template writes, so that it is left as it is but for the tokens' texts.
        harmless = _with_texts(chat.arguments, lambda one: _without(one, [control[token] for token in set(found)]))
        text = _render(tokenizer, chat.template, harmless, chat.now)
        written = _control_ids(tokenizer, chat.template, text)
        if inside:
            settings = {"tokenize": True, "sanitize_control_tokens": True, "return_dict": False}
            spelling = _spelling(tokenizer, chat.template)
            with _SPELLING, refuse_panics():
                ids = list(_render(spelling, chat.template, chat.arguments, chat.now, **settings))
                forget_words(spelling)
    except Exception as error:  # tokenisers raise various errors here
        refusal.__cause__ = error
        return refusal
    found = tuple(token for token in ids if token in control)
    return ids if found in (chat.written, written) else refusal


@lru_cache(maxsize=4)
def _spelling(tokenizer: Any, template: str) -> Any:
    """Return a copy of the tokeniser of which `sanitize_control_tokens` encodes exactly the control tokens as text.

    That sets how a tokeniser encodes, for all threads, so that no other work may be done with it.
    """
    own = copy.deepcopy(tokenizer)
    own.chat_control_tokens = list(_control_tokens(tokenizer, template).values())
    return own


def _without(said: str, texts: Sequence[str]) -> str:
    """Return `said` with nothing but words, of which nobody can make one of the texts."""
    for text in texts:
        said = said.replace(text, _HARMLESS)
    return said if _WORDS.fullmatch(said) else _NO_WORD.sub(_HARMLESS, said)


def _texts(value: Any) -> list[str]:
    found: list[str] = []
    _with_texts(value, found.append)
    return found


def _with_texts(value: Any, change: Callable[[str], object]) -> Any:
    """Return a value in which every text, at any depth, keys included, is replaced by `change` of it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(name, change): _with_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(one, change) for one in value]
    return value


# The clock.


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the chat template may write the date or the time."""
    template = tokenizer.chat_template
    return any(_CLOCK in one for one in (template.values() if isinstance(template, dict) else [template or ""]))


@lru_cache(maxsize=2)
def _written(now: datetime) -> dict[str, str]:
    codes = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
    return {"%%": "\0"} | {code: now.strftime(code) for code in codes} | {"\0": "%"}
