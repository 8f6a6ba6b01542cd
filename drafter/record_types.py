"""Python types that say what a record is: classes of Pydantic, dataclasses, typed dictionaries, `list[int]`."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, ClassVar, NotRequired, get_origin, get_type_hints, is_typeddict

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from typing_extensions import TypedDict

from drafter.errors import RequestError, first_line, one_line

logger = logging.getLogger(__name__)

_LOCAL_FORMATS = {"date-time": "date-time-local", "time": "time-local"}


class RecordType:
    """A type, with its schema, and what reads a record as a value of it."""

    _said: ClassVar[set[str]] = set()  # the names of types that have refused a record

    def __init__(self, given: Any) -> None:
        self._given = given

    @classmethod
    def of(cls, given: Any) -> RecordType | None:
        """Return what a type or a `TypeAdapter` says of records; None for anything else, such as a schema."""
        is_type = isinstance(given, type | TypeAdapter) or get_origin(given) is not None
        return cls(given) if is_type or type(given).__module__ in ("typing", "types", "typing_extensions") else None

    @property
    def name(self) -> str:
        return str(getattr(self._given, "__name__", self._given))

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return self._given if isinstance(self._given, TypeAdapter) else TypeAdapter(_own(self._given))

    def schema(self) -> dict[str, Any]:
        """Return the type's JSON schema; raise `RequestError` for a type without one."""
        try:
            return self._adapter.json_schema(schema_generator=_Schema)
        except Exception as error:  # Pydantic has many, of types that have no schema
            raise RequestError(f"structured_outputs.json: {self.name}: {first_line(error)}") from error

    def read(self, text: str) -> Any:
        """Return a record as a value of the type; raise what the type raises for one that it does not accept."""
        return self._adapter.validate_json(text)

    def accepts(self, text: str) -> bool:
        """Return whether the type accepts a record, and say once if it does not, and its schema does."""
        try:
            self.read(text)
        except Exception as error:  # validators of users raise what they like
            if self.name not in self._said:
                self._said.add(self.name)
                logger.warning("a schema cannot say all of %s, which refuses a record: %s", self.name, one_line(error))
            return False
        return True


def _own(given: Any) -> Any:
    """Return a type that Pydantic takes: before Python 3.12, it takes no dictionaries of `typing`."""
    if not (is_typeddict(given) and sys.version_info < (3, 12)):
        return given
    hints = get_type_hints(given)
    items = {name: hints[name] if name in given.__required_keys__ else NotRequired[hints[name]] for name in hints}
    return TypedDict(given.__name__, items)  # type: ignore[operator]


class _Schema(GenerateJsonSchema):
    """Schemas that say more of what Pydantic accepts than its own."""

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        return _local(super().datetime_schema(schema), schema)

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        return _local(super().time_schema(schema), schema)

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        """As a number: the text that Pydantic takes as well has a regular expression with look-around."""
        numbers: Any = {name: _number(value) for name, value in schema.items()} | {"type": "float"}
        return self.float_schema(numbers)

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        """With the schemes that the type takes."""
        schemes, made = schema.get("allowed_schemes"), super().url_schema(schema)
        return {**made, "pattern": f"^(?:{'|'.join(map(re.escape, schemes))})://[A-Za-z0-9\\[]"} if schemes else made

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        """With the names that are numbers."""
        made = super().dict_schema(schema)
        keys = schema.get("keys_schema", {})
        whole = isinstance(keys, Mapping) and keys.get("type") == "int"
        return {**made, "propertyNames": {"pattern": "^(?:0|-?[1-9][0-9]{0,17})$"}} if whole else made


def _number(value: Any) -> Any:
    """Return a bound as JSON has it."""
    return (int(value) if value == int(value) else float(value)) if isinstance(value, Decimal) else value


def _local(made: JsonSchemaValue, schema: Any) -> JsonSchemaValue:
    return {**made, "format": _LOCAL_FORMATS[made["format"]]} if schema.get("tz_constraint") == "naive" else made
