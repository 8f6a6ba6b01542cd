"""What a request's output must be: a record by a JSON schema, or text by a regular expression or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from drafter.calls import Calls
from drafter.errors import RequestError, shown, unknown_setting
from drafter.half_characters import refuse_half_characters

if TYPE_CHECKING:
    from drafter.record_types import RecordType

MOST_CHOICES = 1000
LONGEST = 120_000
"""Characters of a schema, a regular expression, a grammar or all choices together."""


@dataclass(frozen=True)
class StructuredOutputs:
    """One of these, under vLLM's names.

    Args:
        json: A JSON schema: an object, its JSON text, or a type: a Pydantic model, a dataclass, a `TypedDict`,
            `list[int]`, a `TypeAdapter`. It is kept as text.
        json_object: Any JSON object.
        regex: A regular expression that matches the whole output.
        choice: Texts of which the output is one.
        grammar: A context-free grammar in Lark's notation.

    Raises:
        RequestError: None or several are given, or one is of the wrong type or too long.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    record_type: ClassVar[Any] = None  # of an instance, a `RecordType` if `json` was given as a type

    def __post_init__(self) -> None:
        # No field: what is asked for is the schema, which other processes get alone.
        object.__setattr__(self, "record_type", _record_type(self.json))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.record_type.schema() if self.record_type else self.json))
        if not isinstance(self.json_object, bool):
            raise RequestError(f"structured_outputs.json_object must be true or false, not {shown(self.json_object)}")
        texts = {"regex": self.regex, "grammar": self.grammar}
        for name, text in texts.items():
            if text is not None and not (isinstance(text, str) and text):
                raise RequestError(f"structured_outputs.{name} must be a text that is not empty, not {shown(text)}")
        object.__setattr__(self, "choice", _choices(self.choice))
        given = [one.name for one in fields(self) if getattr(self, one.name)]
        if len(given) != 1:
            named = ", ".join(one.name for one in fields(self))
            raise RequestError(f"structured_outputs must have one of {named}, not {' and '.join(given) or 'none'}")
        if (length := len(self._text())) > LONGEST:
            raise RequestError(
                f"structured_outputs.{given[0]} may have up to {LONGEST} characters, and has {length}: make it smaller"
            )
        refuse_half_characters(self._text(), f"structured_outputs.{given[0]}")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "record_type": None}

    def read(self, text: str) -> Any:
        """Return what a whole output stands for: a JSON value, or one of the type that was given; otherwise the text.

        Raises:
            Exception: The type does not accept it.
        """
        if self.record_type is not None:
            return self.record_type.read(text)
        return json.loads(text) if self.kind in ("json", "json_object") else text

    def _text(self) -> str:
        """Return the characters of the one that is given."""
        return "".join(self.choice) or self.json or self.regex or self.grammar or ""

    @property
    def kind(self) -> str:
        """Name of the one that is given."""
        return next(one.name for one in fields(self) if getattr(self, one.name))

    @classmethod
    def of(cls, given: object) -> StructuredOutputs | None:
        """Return what a request gives: this class, its settings, a record's type, or None for any output."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            if _record_type(given) is not None:
                return cls(json=given)
            raise RequestError(f"structured_outputs must be an object with a schema or the like, not {shown(given)}")
        kind = CallOutputs if given.get("calls") is not None else cls
        if problem := unknown_setting(given, kind):
            raise RequestError(f"structured_outputs: {problem}")
        return kind(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class CallOutputs(StructuredOutputs):
    """Calls of functions, which the endpoint makes of a body's `tools`: no setting of users."""

    calls: Calls | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", Calls.of(self.calls))
        super().__post_init__()

    def _text(self) -> str:
        return "" if self.calls is None else self.calls.text


def _record_type(given: Any) -> RecordType | None:
    if given is None or isinstance(given, str | bool | dict):
        return None
    from drafter.record_types import RecordType  # with Pydantic, which is loaded for those alone who have types

    return RecordType.of(given)


def _schema_text(schema: Any) -> str:
    try:
        if isinstance(schema, str):
            schema = json.loads(schema, parse_constant=_refuse_constant)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {str(error) or 'it is nested too deeply'}") from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"structured_outputs.json must be a JSON schema, which is an object, not {shown(schema)}")
    return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it has the number {name}")


def _choices(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) and one for one in given):
        raise RequestError(f"structured_outputs.choice must be a list of texts that are not empty, not {shown(given)}")
    if len(given) > MOST_CHOICES:
        raise RequestError(f"structured_outputs.choice may have up to {MOST_CHOICES} texts, not {len(given)}")
    return tuple(dict.fromkeys(given))
