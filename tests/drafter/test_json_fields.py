from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from drafter.json_fields import FieldError, from_json


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: dict[str, Inner] = field(default_factory=dict)
    count: int | None = None
    way: Literal["up", "down", 3] = "up"
    rest: Any = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("it has no name")


LEAST: dict[str, Any] = {"name": "a", "inner": {"sizes": [1, 2]}}


def test_values_become_what_the_fields_say() -> None:
    assert from_json(Outer, LEAST) == Outer("a", Inner((1, 2)))
    whole = LEAST | {"many": {"b": {"sizes": [], "share": 1}}, "count": 3, "way": 3, "rest": [{}]}
    found = from_json(Outer, whole)
    assert found == Outer("a", Inner((1, 2)), {"b": Inner((), 1.0)}, 3, 3, [{}])
    assert type(found.many["b"].share) is float
    assert from_json(list[float | None], [1, None]) == [1.0, None]


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"name": 3}, ("name",), "'name' cannot be 3: it must be a valid string"),
        ({"count": True}, ("count",), "'count' cannot be True: it must be a valid integer or null"),
        ({"way": True}, ("way",), "'way' cannot be True: it must be 'up', 'down' or 3"),
        ({"inner": []}, ("inner",), "'inner' cannot be []: it must be an object"),
        ({"inner": {"sizes": [1, 2.0]}}, ("inner", "sizes"), "'sizes' cannot be 2.0: it must be a valid integer"),
        ({"inner": {"sizes": 1}}, ("inner", "sizes"), "'sizes' cannot be 1: it must be a list"),
        ({"inner": {}}, ("inner", "sizes"), "key 'sizes' is missing"),
        ({"many": {"b": {"sizes": [], "size": 1}}}, ("many", "b", "size"), "key 'size'; did you mean sizes?"),
        ({"mood": 1}, ("mood",), "unknown configuration key 'mood'; made by a later release? There are name, "),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], path: tuple[str, ...], words: str) -> None:
    with pytest.raises(FieldError) as error:
        from_json(Outer, LEAST | change)
    assert words in str(error.value)
    assert error.value.path == path


def test_other_keys_can_be_passed_over_and_a_class_refuses_what_it_likes() -> None:
    assert from_json(Outer, LEAST | {"mood": "good"}, others=True) == from_json(Outer, LEAST)
    with pytest.raises(ValueError, match="it has no name"):
        from_json(Outer, LEAST | {"name": ""})
