"""A growing text settles as `decode` will have it, whatever the decoder; stop strings are found in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import AutoTokenizer, CTRLTokenizer, PreTrainedTokenizerFast

from drafter.embedded import EMBEDDED_BASE
from drafter.text.detokenizer import Detokenizer, StopSearch
from tests.support.properties import examples

TOKENS = [
    *(
        "a",
        "b",
        " ",
        "  ",
        "▁",
        "▁a",
        "▁▁",
        "b▁",
        "##a",
        "##",
        "[UNK]",
        "<pad>",
        "|",
        "</w>",
        "a</w>",
        "</w>b",
        "new@@",
    ),
    *("@@", "@@ ", ".", " .", "'", "n't", " n't", "s", "'s", " '", "ve", "re", ",", "!", "é", "\ufffd", "Ġa", "Ġ", "Ċ"),
    *("Ã", "©", "ðŁĺĢ", "ðŁ", "ĺ", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0xF0>", "<0x20>", "nr", "'v", "<s>"),
]
DECODERS: dict[str, Any] = {
    "none": None,
    "bytes": decoders.ByteLevel(),
    "word pieces": decoders.WordPiece("##", cleanup=True),
    "no cleanup": decoders.WordPiece("##", cleanup=False),
    "metaspace": decoders.Metaspace(),
    "no prefix": decoders.Metaspace(prepend_scheme="never"),
    "suffixes": decoders.BPEDecoder("</w>"),
    "joiners": decoders.BPEDecoder("@@"),
    "ctc": decoders.CTC(),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "replaced and fused": decoders.Sequence([decoders.Replace(Regex("a|▁"), "xy"), decoders.Fuse()]),
    "stripped": decoders.Sequence([decoders.Strip("a", 1, 0), decoders.ByteFallback(), decoders.Fuse()]),
    "stripped at the left": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
    "fused and replaced": decoders.Sequence([decoders.Fuse(), decoders.Replace("@@ ", "")]),
}


def made(decoder: Any, *, cleans: bool = False) -> Any:
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, "[UNK]"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans)


TOKENIZERS = {(name, cleans): made(one, cleans=cleans) for name, one in DECODERS.items() for cleans in (False, True)}
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=24)
"""So many that the beginning is forgotten."""


def check(tokenizer: Any, ids: list[int]) -> None:
    """After every token: what has settled is a beginning of all later texts, and with the tail it is the text."""
    detokenizer, settled = Detokenizer(tokenizer), ""
    for place, token in enumerate(ids, start=1):
        settled += detokenizer.push(token)
        assert settled + detokenizer.tail == tokenizer.decode(ids[:place], skip_special_tokens=True)


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("name", DECODERS)
@examples(150)
@given(ids=IDS)
def test_what_settles_is_never_taken_back(name: str, cleans: bool, ids: list[int]) -> None:
    check(TOKENIZERS[name, cleans], ids)


@examples(60)
@given(ids=st.lists(st.integers(0, 2047), max_size=40))
def test_nor_by_the_embedded_tokeniser(ids: list[int]) -> None:
    check(EMBEDDED, ids)


EMBEDDED = AutoTokenizer.from_pretrained(EMBEDDED_BASE)


def text_of(name: str, tokens: list[str]) -> list[str]:
    tokenizer = TOKENIZERS[name, False]
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(TOKENS.index(token)) for token in tokens]


def test_text_comes_as_soon_as_it_is_sure() -> None:
    assert text_of("llama", ["▁a", "b", "<0xE2>", "<0x82>", "<0xAC>", "a"]) == ["a", "b", "", "", "", "€a"]
    assert text_of("suffixes", ["a</w>", "b", "a</w>", "a"]) == ["", "a", " b", "a"]
    assert text_of("bytes", ["a", "Ã", "©", "Ġa"]) == ["a", "", "é", " a"]
    assert text_of("word pieces", ["a", "##a", "."]) == ["a", "a", "."]
    assert text_of("fused and replaced", ["new@@", " ", "a"]) == ["", "", ""]


@pytest.fixture(scope="module")
def ctrl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("ctrl")
    tokens = ["<unk>", "new@@", "er", "low", "est", "@@", ".", "'s"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


@examples(200)
@given(ids=st.lists(st.integers(0, 7), max_size=16))
def test_a_decoder_in_python_that_joins_afterwards(ctrl: Any, ids: list[int]) -> None:
    check(ctrl, ids)


def test_a_stop_string_is_found_in_words_that_are_joined_afterwards(ctrl: Any) -> None:
    detokenizer, search = Detokenizer(ctrl), StopSearch(["newer"])
    for token in (3, 1, 2):
        assert not search.found
        search.push(detokenizer.push(token), detokenizer.tail)
    assert search.cut == len("low ")


FEW = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(st.lists(FEW, max_size=8), STOPS)
def test_each_piece_tells_what_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    search, text = StopSearch(stops), ""
    for piece in pieces:
        search.push(piece)
        text += piece
        assert search.found == any(stop in text for stop in stops)
        if search.found:
            break
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert search.held_back == max((len(one) for one in beginnings if text.endswith(one)), default=0)


def test_literal_texts() -> None:
    search = StopSearch(["aab", "x"])
    search.push("caa")
    assert (search.held_back, search.found) == (2, False)
    search.push("a")
    assert (search.held_back, search.found) == (2, False)
    search.push("b")
    assert search.found
    assert search.cut == 2


def test_a_string_is_found_in_pieces_that_are_not_shown() -> None:
    search = StopSearch(["<end>", "b<x>"])
    for piece, hidden in (("ab", False), ("<s>", True), ("c", False), ("<en", False)):
        search.push(piece, hidden=hidden)
        assert search.cut is None
    search.push("<end>", hidden=True)
    assert (search.found, search.cut) == (True, 6)  # of "abc<en"
    search = StopSearch(["b<x>"])
    search.push("<x>", hidden=True)
    search.push("ab")
    search.push("<x>", hidden=True)
    assert search.cut == 1


def test_a_string_is_found_around_pieces_that_are_not_shown() -> None:
    search = StopSearch(["bc"])
    for piece, hidden in (("ab", False), ("<s>", True), ("cd", False)):
        assert not search.found
        search.push(piece, hidden=hidden)
    assert search.cut == 1


@given(st.lists(FEW, min_size=1, max_size=8), FEW, STOPS, st.integers(0, 8))
def test_what_may_still_change_is_looked_into_and_early_pieces_are_passed_over(
    pieces: list[str], tail: str, stops: list[str], early: int
) -> None:
    search, text, before = StopSearch(stops), "", ""
    for place, piece in enumerate(pieces):
        search.push(piece, tail, counts=place >= early)
        text += piece
        before = text if place < early else before
        ends = [
            at + len(stop) for stop in stops for at in range(len(text + tail)) if (text + tail).startswith(stop, at)
        ]
        assert search.found == (place >= early and any(end > len(before) for end in ends))
        if search.found:
            begins = [at for stop in stops for at in range(len(text + tail)) if (text + tail).startswith(stop, at)
                      and at + len(stop) > len(before)]  # fmt: skip
            assert search.cut == min(begins)
            break


def test_a_piece_costs_what_is_new() -> None:
    """Characters are compared with the strings, whatever came before them: at most twice each, in all."""
    looked = 0

    class Counted(str):
        def __ne__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return str(self) != other

        __hash__ = str.__hash__

    class Wanted(str):
        def __getitem__(self, place: object) -> str:
            return Counted(super().__getitem__(place))  # type: ignore[index]

        __hash__ = str.__hash__

    search = StopSearch([Wanted("a" * 1000 + "b")])
    looked = 0
    for _ in range(3000):
        search.push("a")
    assert not search.found
    assert looked <= 2 * 3000


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
def test_what_is_no_text_costs_no_more_the_longer_it_is(
    tokenizer: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can have one token generated again and again by its bias."""
    half = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("é")[-1])
    assert tokenizer.decode([half]) == "\ufffd"
    token = half if kind == "half characters" else tokenizer.eos_token_id
    decode, decoded = tokenizer.decode, []

    def watched(ids: list[int], **settings: Any) -> str:
        decoded.append(len(ids))
        return str(decode(ids, **settings))

    monkeypatch.setattr(tokenizer, "decode", watched)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for _ in range(500)]
    assert "".join(pieces) == ("\ufffd" * 499 if kind == "half characters" else "")
    assert max(decoded, default=0) <= 8
    (word,) = tokenizer("s", add_special_tokens=False)["input_ids"]
    assert detokenizer.push(word) == ("\ufffd" if kind == "half characters" else "") + "s"
