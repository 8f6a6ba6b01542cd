"""Texts that contain an added token's text, or what a normaliser changes: their bytes, by ordinary tokens."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.grammars import Grammars
from drafter.methods.grammar.spelling import Spelling
from drafter.structured_outputs import StructuredOutputs
from tests.drafter.text.test_chat import SPECIAL, byte_level, metaspace_bpe
from tests.support.walks import walk

MORE = ("<b>", "<file")


@cache
def made(kind: str) -> tuple[Any, Grammars]:
    tokenizer = {"bytes": byte_level, "metaspace": metaspace_bpe}[kind]()
    tokenizer.add_tokens([AddedToken(one, special=False) for one in MORE])
    if kind == "bytes":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def written(guide: Guide, tokenizer: Any, seed: int) -> list[int]:
    """Return the tokens of a random output."""
    tokens = list[int]()
    consume = guide.consume
    guide.consume = lambda token: consume(token) and not tokens.append(token)  # type: ignore[method-assign,func-returns-value]
    walk(guide, tokenizer, Random(seed), length=2000)
    assert tokens.pop() == tokenizer.eos_token_id
    return tokens


pieces = st.lists(st.sampled_from([*SPECIAL, *MORE, "e\u0301", "▁", " ", "x", "5", "ein Wort", "\u00ff"]), min_size=1)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@settings(max_examples=25)
@given(pieces, pieces, st.sampled_from(["choice", "const", "name", "regex"]), st.integers(0, 3))
def test_what_a_grammar_allows_is_written_as_it_is_by_ordinary_tokens(
    kind: str, one: list[str], other: list[str], asked: str, seed: int
) -> None:
    tokenizer, grammars = made(kind)
    texts = ["a" + "".join(one), "b" + "".join(other)]
    escaped = [text.replace("|", r"\|") for text in texts]
    outputs = StructuredOutputs.of(
        {
            "choice": {"choice": texts},
            "const": {"json": {"enum": texts}},
            "name": {"json": {"type": "object", "properties": {texts[0]: {"const": 1}}, "required": [texts[0]]}},
            "regex": {"regex": f"({escaped[0]})|({escaped[1]})"},
        }[asked]
    )
    assert outputs is not None
    tokens = written(grammars.guide(outputs, []), tokenizer, seed)
    allowed = {"const": [f'"{one}"' for one in texts], "name": [f'{{"{texts[0]}": 1}}']}.get(asked, texts)
    assert {*tokenizer.convert_tokens_to_ids([*SPECIAL, "<b>"])}.isdisjoint(tokens)
    assert grammars._tokenizer.decode_bytes(tokens) in [text.encode() for text in allowed]


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_other_texts_have_the_tokens_of_the_tokeniser(kind: str) -> None:
    """In the middle of a text, where no space comes first."""
    tokenizer, _ = made(kind)
    spelling = Spelling(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    plain = spelling._plain
    for text in ("ein Wort", "x <no> {}", "  5"):
        assert spelling(text) == plain.tokenize_str(text)
    assert plain.decode_bytes(spelling(f"ein {SPECIAL[2]} Wort")) == f"ein {SPECIAL[2]} Wort".encode()
    assert spelling(f"ein {SPECIAL[2]} Wort")[:2] == plain.tokenize_str("ein ")[:2]


def test_of_a_long_text_only_the_beginning_is_tokenised() -> None:
    tokenizer, _ = made("bytes")
    spelling, text = Spelling(tokenizer, len(tokenizer), [tokenizer.eos_token_id]), "ein Wort " * 2000
    found = spelling._plain.decode_bytes(spelling(text)).decode()
    assert text.startswith(found)
    assert 900 < len(found) < 1000
