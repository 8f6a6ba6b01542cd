"""How a model writes calls of functions, and an output that has such calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drafter.errors import RequestError
from drafter.json_fields import FieldError, from_json


@dataclass(frozen=True)
class CallForm:
    """The way in which a chat template has a model write calls: `marker`, `first`, the calls with `between`, `last`.

    A call is a JSON object on one line: `{"name": NAME, ARGUMENTS: {…}}`.

    Args:
        marker: Begins the calls, after a text or without one; it is a token in many vocabularies.
        between: Stands between two calls; None for a form of one call only.
        arguments: Name of the field with the arguments.
        bare: Calls stand in the place of a text and not after one, with the marker or without.
    """

    marker: str = ""
    first: str = ""
    between: str | None = None
    last: str = ""
    arguments: str = "arguments"
    bare: bool = False

    def head(self, name: str) -> str:
        """Return what a call begins with, up to its arguments; after these it ends with `}`."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '

    def with_marks(self, marks: Mapping[str, str]) -> CallForm:
        """Return the form with other texts in the places of these, the longest first."""
        parts = {name: getattr(self, name) for name in ("marker", "first", "between", "last")}
        for text in sorted(marks, key=len, reverse=True):
            parts = {name: part and part.replace(text, marks[text]) for name, part in parts.items()}
        return replace(self, **parts)


@dataclass(frozen=True)
class Calls:
    """An output with calls of functions.

    Args:
        functions: Names, each with the JSON schema of its arguments as JSON text.
        several: More than one call is allowed, where the form has a way to write that.
        otherwise: What the output may be instead: a JSON schema as JSON text, or, if it is empty, any text, also before
            the calls. None: there must be a call.
    """

    form: CallForm
    functions: tuple[tuple[str, str], ...]
    several: bool = True
    otherwise: str | None = None

    def __post_init__(self) -> None:
        if not self.functions:
            raise RequestError("structured_outputs.calls must have a function that can be called")
        if self.otherwise and self.form.bare:
            raise RequestError(
                "the chat template does not mark calls, so that they cannot be told from another JSON object: ask for "
                "calls, or for the object"
            )

    @property
    def text(self) -> str:
        return "".join(map("".join, self.functions)) + (self.otherwise or "")

    @classmethod
    def of(cls, given: Any) -> Calls | None:
        """Return calls given as such or as JSON has them; raises a `RequestError` for anything else."""
        if given is None or isinstance(given, cls):
            return given
        try:
            return from_json(cls, dict(given) if isinstance(given, Mapping) else given)  # type: ignore[no-any-return]
        except FieldError as error:
            place = ".".join(("structured_outputs.calls", *error.path))
            raise RequestError(f"{place}: {error}") from error
