"""Grammars whose terminals may take what follows them."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from drafter.errors import RequestError
from drafter.methods.grammar.compiling import LIMITS
from drafter.methods.grammar.lark import as_lark_reads
from drafter.structured_outputs import StructuredOutputs
from tests.methods.grammar.test_numbers import accepts
from tests.methods.grammar.test_validity import grammars

_ANY = "/(.|\\n)+/"


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (f'start: "<a>" TEXT "</a>"\nTEXT: {_ANY}', ["<a>x</a>", "<a></a></a>"]),
        (f'start: "<a>" {_ANY} "</a>"', ["<a>x</a>"]),
        ('start: a "b"\na: "a" | "ab"', ["ab", "abb"]),
        ('start: A "b"  // "a"\nA: "a" | "ab"', ["ab", "abb"]),
        ('start: /a+/ "a"', ["aa", "aaa"]),
        ('start: a~2 "b"\na: "a" | "ab"', ["aab", "abab"]),
        ('start: a{1,2} "b"\na: "a" | "ab"', ["ab", "aab"]),
        ('start: [a] "b"\na: "a" | "ab"', ["b", "ab", "abb"]),
        ("?start: word word -> two\n!word: /[a-z]+/", ["ab", "abc"]),
        (f'start: item+\nitem: "<i>" TEXT "</i>" "\\n"\nTEXT: {_ANY}', ["<i>x</i>\n", "<i>x</i>\n<i>y</i>\n"]),
        (f'start: "x" | t | "(" start ")"\nt: "<a>" TEXT "</a>"\nTEXT: {_ANY}', ["x", "<a>x</a>", "((x))"]),
    ],
)
def test_a_grammar_has_the_texts_that_lark_reads(grammar: str, texts: list[str]) -> None:
    read = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(as_lark_reads(grammar, LIMITS)), log_level=0)
    assert [text for text in texts if not accepts(read, text)] == []
    assert grammars().guide(StructuredOutputs(grammar=grammar), []).problem is None


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "[" (word ("," word)*)? "]"\nword: /[a-z]{1,3}/',
        'start: NAME "=" VALUE "\\n" NAME\nNAME: /[a-z]+/\nVALUE: /[^\\n]*/',
        'start: expr\nexpr: expr "+" term | term\nterm: "(" expr ")" | /[0-9]+/ -> num',
        'start: value\n?value: array | STRING\narray: "[" [value ("," value)*] "]"\nSTRING: /"[^"]*"/',
        'start: /[a-z]{300}/ "1"',
        'start: "x" | /[a-z]{1000}/',
        '%import common.WS\n%ignore WS\nstart: "a" /[^;]+/ ";"',
        'start: (line "\\n"){3}\nline: /[a-z ]+/',
    ],
)
def test_a_grammar_that_is_read_alike_is_compiled_as_it_is(grammar: str) -> None:
    assert as_lark_reads(grammar, LIMITS) == grammar


@pytest.mark.parametrize(
    "grammar",
    [f'start: e\ne: "<a>" (TEXT | e)* "</a>"\nTEXT: {_ANY}', f'%ignore " "\nstart: "<a>" TEXT "</a>"\nTEXT: {_ANY}'],
)
def test_a_grammar_of_which_no_text_ends_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.grammar cannot be used: no text of it ends") as found:
        grammars().guide(StructuredOutputs(grammar=grammar), [])
    assert "\n" not in str(found.value)
