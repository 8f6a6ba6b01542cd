"""The errors a caller can do something about. Each message says which input, what is wrong and what to do."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be generated; nobody else's request is affected."""


class RequestTimeoutError(RequestError):
    """A request that was not done within its own time limit."""


class LoadError(ValueError):
    """A base model or a draft head that cannot be loaded or cannot be used."""


class QueueFullError(RuntimeError):
    """The engine's waiting queue is full: submit again later."""


class EngineError(RuntimeError):
    """The engine failed at a step; every request it held ends with this."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""
