"""The errors a caller can do something about. Each message says which input, what is wrong and what to do."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be generated; nobody else's request is affected."""


class PromptTooLongError(RequestError):
    """A request whose prompt leaves no room for output."""


class RequestTimeoutError(RequestError):
    """A request that was not done within its own time limit."""


class NotFiniteError(RequestError):
    """A request for which the base computes numbers that are not finite: its activations overflow."""


class LoadError(ValueError):
    """A base model or a draft head that cannot be loaded or cannot be used."""


class QueueFullError(RuntimeError):
    """The engine's waiting queue is full: submit again later."""


class EngineError(RuntimeError):
    """The engine failed at a step; every request it held ends with this."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return printable((str(error).strip() or type(error).__name__).split("\n")[0])


def printable(text: str) -> str:
    """Escape what a terminal acts on, as Python writes it: control characters, and those that turn the text around.

    All that comes from others goes through it on its way to a terminal: names of files, a dataset's README, a model.
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def one_line(error: BaseException | str, limit: int = 500) -> str:
    """An error's message on one line of at most `limit` characters, all of them printable."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object, limit: int = 80) -> str:
    """A value as a message quotes it, in Python's words: its beginning where it has more than `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
