"""Types of the kinds by which people ask for records."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NaiveDatetime,
    NegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)
from typing_extensions import TypeAliasType

Name = Annotated[str, StringConstraints(min_length=1, max_length=12)]
Share = Annotated[float, Field(ge=0, le=1)]


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Person(BaseModel):
    name: Name
    age: Annotated[int, Field(ge=0, le=130)]
    email: Annotated[str, Field(pattern=r"^[a-z]{1,8}@[a-z]{1,8}\.(com|org)$")] | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: Annotated[float, Field(gt=0, lt=100)]


class Node(BaseModel):
    value: int
    children: Annotated[list[Node], Field(max_length=2)] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    count: int
    ratio: float
    flag: bool


class Aliased(BaseModel):
    first: Annotated[int, Field(alias="First Name")]
    größe: float


@dataclass
class Point:
    x: float
    y: float = 0.0


class Movie(TypedDict):
    title: Name
    year: int


class Pair(NamedTuple):
    left: int
    right: Name


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    content: T


TYPES: dict[str, Any] = {
    "model": Person,
    "list of models": Annotated[list[Person], Field(max_length=2)],
    "tagged": Annotated[Cat | Dog, Field(discriminator="kind")],
    "union": Cat | Dog,
    "optional": Person | None,
    "recursive": Node,
    "strict": Strict,
    "alias": Aliased,
    "dataclass": Point,
    "typed dictionary": Movie,
    "named tuple": Pair,
    "generic": Box[Point],
    "generic with brackets": list[Box[Box[int]]],
    "root model": RootModel[Annotated[list[int], Field(max_length=3)]],
    "adapter": TypeAdapter(tuple[int, Name]),
    "enum": Mood,
    "enum of numbers": list[Level],
    "literal": Literal["a", "b", 3, None],
    "integer": int,
    "number": float,
    "text": Name,
    "boolean": bool,
    "positive": PositiveFloat,
    "positive integer": PositiveInt,
    "negative": NegativeFloat,
    "from zero": NonNegativeInt,
    "share": Share,
    "open share": Annotated[float, Field(gt=0, lt=1)],
    "half open": Annotated[float, Field(ge=0, lt=5)],
    "above minus one": Annotated[float, Field(gt=-1)],
    "narrow": Annotated[float, Field(gt=0.25, lt=0.2500001)],
    "int64": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "half steps": Annotated[float, Field(multiple_of=0.5, ge=0, le=10)],
    "fives": Annotated[int, Field(multiple_of=5, gt=0)],
    "decimal": Decimal,
    "price": Annotated[Decimal, Field(gt=0, le=Decimal("0.3"))],
    "alias of a type": TypeAliasType("Alias", list[int]),
    "naive": NaiveDatetime,
    "aware": AwareDatetime,
    "date": datetime.date,
    "date and time": datetime.datetime,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "address": HttpUrl,
    "any address": AnyUrl,
    "IPv4": ipaddress.IPv4Address,
    "IPv6": ipaddress.IPv6Address,
    "interface": ipaddress.IPv4Interface,
    "UUID": uuid.UUID,
    "UUID 4": UUID4,
    "path": Annotated[Path, Field()],
    "bytes": Annotated[bytes, Field(max_length=6)],
    "secret": SecretStr,
    "map": dict[Name, int],
    "map by literals": dict[Literal["x", "y"], Share],
    "map by an enum": dict[Mood, int],
    "map by numbers": dict[int, Name],
    "map by dates": dict[datetime.date, bool],
    "tuple": tuple[int, Name, bool],
    "sequence": Annotated[Sequence[Share], Field(min_length=1, max_length=3)],
    "set": Annotated[set[Literal["a", "b", "c"]], Field(min_length=1)],
    "frozen set": Annotated[frozenset[bool], Field(max_length=2)],
    "set in an option": set[bool] | None,
}
