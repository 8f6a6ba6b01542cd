"""References in any spelling."""

from __future__ import annotations

from random import Random
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.grammar.places import place_of, pointer
from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.test_validity import grammars, tokenizer
from tests.support.properties import examples
from tests.support.walks import walk

NAMES = ["Größe", "Option<Foo>", "a b", "list[int]", "a/b~c", "100%", "%41", "年齢", 'quo"te', "a#b", "a?b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_definition_is_found_by_any_spelling(name: str) -> None:
    plain = pointer(("$defs", name))
    for reference in {plain, "#" + quote(plain[1:]), "#" + quote(plain[1:], safe="/$~<>[]")}:
        schema = {"$defs": {name: {"const": 7}}, "type": "array", "items": {"$ref": reference}, "minItems": 1}
        guide = grammars().guide(StructuredOutputs(json=schema), [])
        assert str(walk(guide, tokenizer(), Random(1))).startswith("[7")


def test_definitions_that_refer_to_each_other_may_have_such_names() -> None:
    node = {"type": "object", "properties": {"é": {"$ref": "#/$defs/Baum%20A/properties/größe"}, "größe": {"const": 1}}}
    schema: dict[str, Any] = {"$ref": "#/$defs/Baum A", "$defs": {"Baum A": {**node, "required": ["é", "größe"]}}}
    guide = grammars().guide(StructuredOutputs(json=schema), [])
    assert walk(guide, tokenizer(), Random(1)) == '{"é": 1, "größe": 1}'


@examples(100)
@given(st.text(min_size=1), st.booleans())
def test_every_name_is_found(name: str, quoted: bool) -> None:
    plain = pointer(("$defs", name))
    reference = "#" + quote(plain[1:], errors="surrogatepass") if quoted else plain
    if quoted or "%" not in name:
        assert place_of(reference, {"$defs": {name: {}}}) == ("$defs", name)
