"""What is refused of a schema, where, and what it is written as."""

from __future__ import annotations

import re
from typing import Any

import pytest

from drafter.errors import RequestError
from drafter.methods.grammar.formats import FORMATS, pattern_problem
from drafter.methods.grammar.places import places, pointer
from drafter.methods.grammar.schemas import MOST_OPTIONAL, MOST_PROPERTIES, REFUSED, checked_schema
from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.test_validity import grammars
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "schemas.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of a table of the page, without its two lines of heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return table[2:]


def error_of(schema: Any) -> str:
    with pytest.raises(RequestError) as found:
        grammars().guide(StructuredOutputs(json=schema), [])
    return str(found.value)


def objects(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {} for index in range(count)}, **more}


@pytest.mark.parametrize("row", rows("Followed"), ids=lambda row: row[0])
def test_what_the_page_lists_as_followed_compiles(row: list[str]) -> None:
    grammars().guide(StructuredOutputs(json=row[1].strip("`")), [])


@pytest.mark.parametrize("row", rows("Refused"), ids=lambda row: row[0])
def test_what_the_page_lists_as_refused_is_refused_by_name(row: list[str]) -> None:
    named = re.findall(r"`([^`]+)`", row[0])
    message = error_of(row[1].strip("`"))
    assert any(name in message for name in named)
    assert "\n" not in message


def test_the_page_lists_every_refused_keyword_and_every_format() -> None:
    assert set(REFUSED) <= {name for row in rows("Refused") for name in re.findall(r"`([^`]+)`", row[0])}
    assert set(FORMATS) <= {name for row in rows("Followed") for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"age": {"not": {}}}}, "properties.age.not"),
        ({"properties": {"not": {"items": {"if": {}}}}}, "properties.not.items.if"),
        ({"anyOf": [{}, {"prefixItems": [{"contains": True}]}]}, "anyOf.1.prefixItems.0.contains"),
        ({"type": "object", "$defs": {"a": {"$ref": "#/$defs/b"}}}, "$defs.a.$ref"),
        ({"$ref": "#/x", "x": {"type": "string"}}, "$ref"),
        ({"properties": {"a": {"patternProperties": {"a": {"type": "null"}, "b": {"type": "null"}}}}}, "properties.a:"),
        ({"properties": {"a": {"type": "strin"}}}, "properties.a:"),
        ({"minimum": 3, "maximum": 2, "type": "number"}, "cannot be used: nothing is allowed there"),
    ],
)
def test_the_message_names_the_place(schema: Any, place: str) -> None:
    assert place in error_of(schema)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "record", "schema": {"type": "object"}}, ["'name'", "give what is in 'schema'"]),
        ({"name": "record", "description": "d", "strict": True, "schema": {"$ref": "#"}}, ["in 'schema'"]),
        ({"type": "json_schema", "json_schema": {"name": "r", "schema": {}}}, ["'json_schema'", "in 'json_schema'"]),
        ({"json": {"type": "object"}}, ["in 'json'"]),
        ({"type": "function", "function": {"parameters": {"type": "object"}}}, ["'function'"]),
        ({"name": "Tom", "age": 3}, ["'name'", "no example"]),
        ({"title": "Dune", "author": "Herbert"}, ["'author'", "no example"]),
        ({"type": "book", "pages": 3}, ["'book'", "no type"]),
        ({"properties": {"age": {"integer": True}}}, ["properties.age", "'integer'"]),
        ({"$defs": {"A": {"type": "string"}}}, ["$ref"]),
        ({"type": "object", "schema": {"type": "object"}}, ["'schema'", "give it alone"]),
        ({"type": "array", "items": {"type": "object", "proprties": {"a": {"type": "null"}}}}, ["items", "proprties"]),
    ],
)
def test_what_is_no_schema_is_refused(given: Any, words: list[str]) -> None:
    message = error_of(given)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("schema", [True, {}, {"title": "x"}, {"properties": {"a": {"description": "d", "ui": 1}}}])
def test_a_schema_may_say_nothing(schema: Any) -> None:
    assert checked_schema(schema) == ({} if schema is True else schema)


@pytest.mark.parametrize(
    ("names", "written"),
    [
        ({"enum": ["a", "b"]}, {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}),
        ({"$ref": "#/$defs/N"}, {"properties": {"c": {"type": "null"}}}),
        ({"pattern": "^x"}, {"patternProperties": {"^x": {"type": "null"}}}),
        (
            {"type": "string", "minLength": 1, "maxLength": 3},
            {"patternProperties": {r"^[\s\S]{1,3}$": {"type": "null"}}},
        ),
    ],
)
def test_names_of_properties_are_written_as_properties(names: Any, written: Any) -> None:
    definitions = {"$defs": {"N": {"const": "c"}}}
    given = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "null"}, **definitions}
    assert checked_schema(given) == {"type": "object", "additionalProperties": False, **written, **definitions}


def test_formats_that_only_annotate_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "x-colour"}, "b": {"format": "date"}}}
    for _ in range(2):
        grammars().guide(StructuredOutputs(json=schema), [])
    assert caplog.messages == ["format 'x-colour' only annotates: texts of it are not checked"]


def test_options_of_the_parser_are_dropped_wherever_they_are() -> None:
    options = {"x-guidance": {"lenient": True}}
    assert checked_schema({**options, "items": {"anyOf": [{**options, "type": "null"}]}}) == {
        "items": {"anyOf": [{"type": "null"}]}
    }
    assert "not is not supported" in error_of({**options, "not": {}})


def test_what_is_not_a_schema_is_kept_as_it_is() -> None:
    schema = {"properties": {"x-guidance": {"const": {"not": 1, "$id": "x"}}}, "default": {"if": 2}, "examples": [{}]}
    assert checked_schema(schema) == schema


def test_one_of_is_written_as_any_of_where_no_value_is_in_two() -> None:
    branches = [{"type": "string"}, {"enum": [1, 2]}, {"const": True}]
    assert checked_schema({"oneOf": branches}) == {"allOf": [{"anyOf": branches}]}
    for overlapping in ([{"const": 1}, {"const": 1.0}], [{"type": "string"}, {"maxLength": 3}], [{}, {"type": "null"}]):
        assert "oneOf" in error_of({"oneOf": overlapping})
    tagged = [{"properties": {"k": {"const": name}}, "required": ["k"]} for name in "ab"]
    assert "oneOf" in error_of({"oneOf": tagged}), "3 is in both"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"allOf": [objects(MOST_PROPERTIES // 2 + 1, required=[f"p{i}" for i in range(2501)])] * 2},
            "5000 properties",
        ),
        (objects(MOST_OPTIONAL + 1), "1500 properties"),
        ({"enum": [f"{index}" for index in range(1001)]}, "1000 values of enum"),
        ({"enum": [f"{index:061}" for index in range(251)]}, "15000"),
        ({"allOf": [objects(65), {"minProperties": 1}]}, "64 properties"),
        ({"anyOf": [{"multipleOf": 97}, {"multipleOf": 107}]}, "10000 as least common multiple"),
    ],
)
def test_what_is_too_large_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_schema(schema)


def test_as_many_optional_properties_as_the_limit_are_allowed() -> None:
    checked_schema(objects(MOST_OPTIONAL))


def test_ten_levels_are_allowed_and_eleven_are_not() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(10):
        schema = {"properties": {"a": schema}} if level % 2 else {"items": schema}
    checked_schema(schema)
    assert "10 levels" in error_of({"items": schema})


def test_every_place_of_a_schema_is_found() -> None:
    schema = {"properties": {"a/b": {"items": True}}, "anyOf": [{}], "const": {"items": {}}}
    assert [pointer(place) for place in places(schema)] == [
        "#",
        "#/properties/a~1b",
        "#/properties/a~1b/items",
        "#/anyOf/0",
    ]


@pytest.mark.parametrize(
    "pattern",
    [r"a(?=b)", r"(?<!a)b", r"(a)\1", r"\bword", "[a[b]]", "[a&&b]", "[x--y]", "(?x)a b", r"\x{41}", "a++", "a{2}{3}"],
)
def test_patterns_that_are_read_otherwise_are_refused(pattern: str) -> None:
    assert pattern_problem(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\[a[\]b^]]", r"[\[&-]a", r"\\1", "(?:a|b)+?", "(?i)abc", "(?<name>a)", r"a\{2}{3}", "a?b*c+", ""]
)
def test_other_patterns_are_not(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "a(?=b)"}, ["regex", "look-around", "a(?=b)"]),
        ({"regex": "("}, ["regex", "unclosed group"]),
        ({"regex": r"(a)\1"}, ["regex", "backreferences"]),
        ({"grammar": "start: b"}, ["grammar", "unknown name"]),
        ({"grammar": 'foo: "a"'}, ["grammar", "no start"]),
        ({"grammar": 'start[max_tokens=3]: "a"'}, ["grammar", "max_tokens", "remove"]),
        ({"grammar": 'start: %json {"not": {}}'}, ["grammar", "%json"]),
        ({"grammar": '%llguidance {}\nstart: "a"'}, ["grammar", "%llguidance"]),
        ({"choice": ["a", "\ud800"]}, ["choice", "half a character"]),
    ],
)
def test_errors_of_other_kinds_are_of_one_line(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as found:
        grammars().guide(StructuredOutputs(**asked), [])
    assert all(word in str(found.value) for word in words)
    assert "\n" not in str(found.value)


def test_words_of_the_parser_may_be_in_texts_of_a_grammar() -> None:
    grammars().guide(StructuredOutputs(grammar='start: "%json" /@a stop=/ // max_tokens=3\n'), [])
