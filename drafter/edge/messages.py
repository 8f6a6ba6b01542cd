"""Messages between a device and a server, one JSON object each; `docs/research/edge.md` describes them.

They are read strictly: whatever is missing, unknown or out of range is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from drafter.tree.paths import follow

PATH = "/v1/edge"
VERSION = 1
MOST_TOKENS = 256
"""Draft tokens of a message at most; a server may allow fewer."""
LONGEST_DRAFT = 16 << 10
"""Bytes of a message but the first one."""
_LONGEST_SHOWN = 60


class MessageError(ValueError):
    """A message that is refused, or a session that cannot go on; `code` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Open:
    """Opens a session, or goes on with the one that the device has opened by this name.

    Args:
        session: A name that the device has drawn, of 32 hex digits.
        tokenizer: `vocabulary_digest` of the device's tokeniser.
        request: The body of a request to `/v1/chat/completions` or `/v1/completions`, of one choice and with a seed.
        output: Output tokens that the device has.
        patience: Seconds of silence after which the server goes on by itself; None for never.
        prompt: The tokens that a server has made of the request's chat, if one has; the rest of the request holds on.
    """

    kind: ClassVar[str] = "open"
    session: str
    tokenizer: str
    request: dict[str, Any]
    output: tuple[int, ...] = ()
    patience: float | None = None
    prompt: tuple[int, ...] | None = None
    version: int = VERSION


@dataclass(frozen=True)
class Opened:
    """Answers `Open` with the output tokens after those that the device has.

    Args:
        at: Output tokens that the device has.
        tokens: Those that follow.
        finished: Why the text ends after them; None if it does not.
        most: Draft tokens that a message may have.
        prompt: The prompt's tokens, unless the request has them.
    """

    kind: ClassVar[str] = "opened"
    at: int
    tokens: tuple[int, ...]
    most: int
    prompt: tuple[int, ...] | None = None
    finished: str | None = None


@dataclass(frozen=True)
class Draft:
    """Draft tokens after the first `at` output tokens.

    Args:
        seq: Larger than that of every draft before, unless this is one of them once more.
        parents: Index of each token's parent, which comes before it; -1 for the text's end. None for a chain.
    """

    kind: ClassVar[str] = "draft"
    seq: int
    at: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    @property
    def tree(self) -> tuple[int, ...]:
        """The parents, also of a chain."""
        return tuple(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    def follow(self, text: Sequence[int]) -> list[int]:
        """Return the nodes on the path that a text takes from the root, as far as it stays in the tree."""
        return follow(self.tokens, self.tree, text)


@dataclass(frozen=True)
class Verified:
    """Answers a draft with the tokens that follow the first `at` output tokens, `accepted` of them as drafted."""

    kind: ClassVar[str] = "verified"
    seq: int
    at: int
    accepted: int
    tokens: tuple[int, ...]
    finished: str | None = None


@dataclass(frozen=True)
class Close:
    kind: ClassVar[str] = "close"


@dataclass(frozen=True)
class Error:
    """Refuses the draft `seq`; without one, the connection ends."""

    kind: ClassVar[str] = "error"
    code: str
    message: str
    seq: int | None = None


Message = Open | Opened | Draft | Verified | Close | Error
FROM_DEVICE: tuple[type[Message], ...] = (Open, Draft, Close)
FROM_SERVER: tuple[type[Message], ...] = (Opened, Verified, Error)


def write(message: Message) -> str:
    """Return a message as JSON, without the fields that have their defaults."""
    given: dict[str, Any] = {"type": message.kind}
    for one in fields(message):
        value = getattr(message, one.name)
        if value != one.default or one.name == "version":
            given[one.name] = value
    return json.dumps(given, ensure_ascii=False, separators=(",", ":"))


def read(text: str | bytes, kinds: Sequence[type[Message]]) -> Any:
    """Return the message of one of `kinds` that a text is. Raises `MessageError` if it is none."""
    try:
        given = json.loads(text, parse_constant=_refuse_constant)
        if isinstance(text, str) and "\\u" in text:  # an escape can be half of a character
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise MessageError("malformed", "the message is not JSON") from error
    if not isinstance(given, dict):
        raise MessageError("malformed", "the message is not a JSON object")
    name = given.pop("type", None)
    kind = next((one for one in kinds if one.kind == name), None)
    if kind is None:
        known = ", ".join(one.kind for one in kinds)
        raise MessageError("malformed", f"there is no message of type {_shown(name)}: there are {known}")
    if kind is Open and given.get("version") != VERSION:
        raise MessageError("version", f"version {_shown(given.get('version'))} is not spoken here: use {VERSION}")
    known_fields = {one.name: one for one in fields(kind)}
    for name in given:
        if name not in known_fields:
            raise MessageError("malformed", f"{kind.kind} has no field {_shown(name)}")
    for name, one in known_fields.items():
        if name in given:
            given[name] = _checked(kind.kind, name, given[name], optional=one.default is None)
        elif one.default is MISSING:
            raise MessageError("malformed", f"{kind.kind} needs the field {name}")
    message = kind(**given)
    if isinstance(message, Draft):
        _check_tree(message)
    return message


def _check_tree(draft: Draft) -> None:
    parents = draft.tree
    if len(draft.tokens) > MOST_TOKENS:
        raise MessageError("malformed", f"draft.tokens has {len(draft.tokens)} tokens: at most {MOST_TOKENS} may come")
    if len(parents) != len(draft.tokens) or not all(-1 <= parent < one for one, parent in enumerate(parents)):
        raise MessageError("malformed", "draft.parents must have an index for each token, of one before it or -1")


def _checked(kind: str, name: str, value: Any, *, optional: bool) -> Any:
    if value is None and optional:
        return None
    must, check = _CHECKS[name]
    if not check(value):
        raise MessageError("malformed", f"{kind}.{name} must be {must}, not {_shown(value)}")
    return tuple(value) if isinstance(value, list) else value


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**31


def _are_counts(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(_is_count(one, least) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_COUNT = ("an integer from 0", _is_count)
_TOKENS = ("a list of token ids", _are_counts)
_TEXT = ("text", _is_text)
_SESSION = re.compile("[0-9a-f]{32}")
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "session": ("32 hex digits", lambda value: _is_text(value) and _SESSION.fullmatch(value) is not None),
    "tokenizer": _TEXT,
    "request": ("an object", lambda value: isinstance(value, dict)),
    "patience": ("a number of seconds from 0", lambda value: type(value) in (int, float) and 0 <= value < 1e6),
    "version": _COUNT,
    "parents": ("a list of integers from -1", lambda value: _are_counts(value, -1)),
    "code": _TEXT,
    "message": _TEXT,
    "finished": _TEXT,
    **dict.fromkeys(("seq", "at", "accepted", "most"), _COUNT),
    **dict.fromkeys(("output", "tokens", "prompt"), _TOKENS),
}


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
