from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from drafter.embedded import EMBEDDED_BASE
from drafter.text.tokenizers import Detokenizer


class Watched:
    """A tokeniser that notes how many tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded: list[int] = []

    def decode(self, ids: list[int], **settings: Any) -> str:
        self.decoded.append(len(ids))
        return str(self._tokenizer.decode(ids, **settings))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED_BASE)


def test_no_piece_is_half_a_character(tokenizer: Any) -> None:
    ids = tokenizer("né 😀!", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == "né 😀!"
    assert "😀" in pieces
    assert "" in pieces


@pytest.mark.parametrize("kind", ["half characters", "special tokens"])
def test_what_is_no_text_costs_no_more_the_longer_it_is(tokenizer: Any, kind: str) -> None:
    """A client can have one token generated again and again by its bias."""
    half = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("é")[-1])
    assert tokenizer.decode([half]) == "\ufffd"
    token = half if kind == "half characters" else tokenizer.eos_token_id
    watched = Watched(tokenizer)
    detokenizer = Detokenizer(watched)
    assert not any(detokenizer.push(token) for _ in range(500))
    assert max(watched.decoded) <= 16
    (word,) = tokenizer("s", add_special_tokens=False)["input_ids"]
    assert detokenizer.push(word) == ("\ufffd" * 500 if kind == "half characters" else "") + "s"
