"""Errors that a caller can handle. Each message says which input, what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from drafter.other_names import hint


class RequestError(ValueError):
    """A request that cannot be generated; other requests are not affected."""


class PromptTooLongError(RequestError):
    """A request whose prompt leaves no room for output. Its message ends with `ADVICE`."""

    ADVICE = "shorten the prompt or raise max_model_len"


class RequestTimeoutError(RequestError):
    """A request that exceeded its own deadline."""


class NotFiniteError(RequestError):
    """A request for which the target model's activations overflow."""


class LoadError(ValueError):
    """A model or a draft head that cannot be loaded or used."""


class QueueFullError(RuntimeError):
    """The waiting queue is full: submit again later."""


class EngineError(RuntimeError):
    """The engine failed at a step; every request it held ends with this."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


_SECRETS = (
    (re.compile(r"://[^\s/?#@'\"]+(?::(?!\d+/)[^\s@'\"]*)?@"), "://***@"),
    (
        re.compile(r"([?&][^=&\s]*(?:secret|token|sig|password|credential|key)[^=&\s]*=)[^&\s'\"]+", re.IGNORECASE),
        r"\1***",
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), "hf_***"),
)


def without_secrets(text: str) -> str:
    """Hide the credentials of URIs, in front of the host or in the query, and tokens of the hub."""
    for pattern, hidden in _SECRETS:
        text = pattern.sub(hidden, text)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return printable((str(error).strip() or type(error).__name__).split("\n")[0])


def printable(text: str) -> str:
    """Escape control characters, and those that reverse text, in untrusted text on its way to a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def one_line(error: BaseException | str, limit: int = 500) -> str:
    """Return an error's message on one line of at most `limit` printable characters."""
    text = without_secrets(printable(" ".join(str(error).split()))) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object, limit: int = 80) -> str:
    """Quote a value for a message, cut to `limit` characters."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def unknown_setting(given: Iterable[str], kind: type) -> str | None:
    """Return a message for the first name that is no field of the dataclass `kind`; None if all are."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            named = shown(name).strip("'")
            return f"unknown setting {named}" + (hint(name, known) or f"; there are {', '.join(known)}")
    return None
