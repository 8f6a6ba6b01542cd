"""Results that are kept between requests for their own salt only.

A result that comes at once tells whoever asks that it has been asked for before. What depends on the content of
requests is therefore kept for each salt apart, as prefixes of prompts are; see `Request.salt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SALT: ContextVar[str] = ContextVar("salt", default="")


@contextmanager
def kept_for(salt: str) -> Iterator[None]:
    """What a `with` block works out is kept for `salt`, and it uses nothing that was kept for another one."""
    before = _SALT.set(salt)
    try:
        yield
    finally:
        _SALT.reset(before)


def salted_cache(most: int) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator like `functools.lru_cache(most)`, whose results are kept for each salt apart."""

    def decorated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @lru_cache(maxsize=most)
        def kept(salt: str, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            return function(*arguments, **named)

        @wraps(function)
        def found(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            return kept(_SALT.get(), *arguments, **named)  # type: ignore[arg-type]

        return found

    return decorated
