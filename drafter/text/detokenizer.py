"""A growing output's text, and the search for stop strings in it.

The pieces of a stream join to `tokenizer.decode` of all its tokens, so a piece is handed out once no later token can
change it: it is *settled*. What settles when follows from the tokeniser's decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drafter.text.tokenizers import special_texts

_INCOMPLETE = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_LOCAL = {"ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
"""Steps of a decoder that make the text of a token from it and from those before it."""
_TRIMS = {"Metaspace", "Strip", "WordPiece"}  # steps that leave out a space with which a text begins
_WINDOW, _KEPT = 8, 4  # most tokens that are decoded together, and those that stay when they are too many

_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
Settles = Literal["at once", "one later", "unknown", "hidden"]


@dataclass(frozen=True)
class _Decoding:
    """How a tokeniser decodes.

    Args:
        settles: `at once`: no token changes the text of those before it. `one later`: only that of the last one, which
            by itself is no longer than before others. `unknown`: nothing that is sure. `hidden`: the tokeniser's own
            code decodes; it is taken to change no letter or digit but those of the last token.
        byte_tokens: Those of which several in a row are decoded together.
        special: Tokens that are left out before decoding, as far as that is sure.
        cleans: Spaces are taken out of the decoded text.
        before: A word behind which a text is decoded as one that goes on; none where that is nothing else.
    """

    settles: Settles
    byte_tokens: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    cleans: bool = False
    before: tuple[int, ...] = ()


@lru_cache(maxsize=4)
def _decoding(tokenizer: Any) -> _Decoding:
    made, base = type(tokenizer), PreTrainedTokenizerBase
    cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    if cleans and made.clean_up_tokenization is not base.clean_up_tokenization:
        return _Decoding("unknown")
    its_own = not isinstance(tokenizer, PreTrainedTokenizerFast) or made.decode is not base.decode
    if its_own or made._decode is not PreTrainedTokenizerFast._decode:
        return _Decoding("hidden", cleans=cleans)
    backend = tokenizer.backend_tokenizer
    cleans &= type(backend.model).__name__ != "BPE" or getattr(tokenizer, _CLEANS_BPE, True)
    steps = [] if backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    settles: Settles = "unknown"
    if _is_local(steps):
        settles = "at once"
    elif kinds <= {"BPEDecoder", "Fuse"}:
        settles = "one later"
    vocabulary = tokenizer.get_vocab() if "ByteFallback" in kinds else {}
    byte_tokens = frozenset(number for token, number in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
    before = tokenizer("x", add_special_tokens=False)["input_ids"][-1:] if kinds & _TRIMS else ()
    return _Decoding(settles, byte_tokens, frozenset(special_texts(tokenizer)), cleans, tuple(before))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for one in decoder["decoders"] for step in _steps(one)]


def _is_local(steps: Sequence[dict[str, Any]]) -> bool:
    joined = False  # from here on a step sees the whole text
    for step in steps:
        whole = step["type"] == "Fuse" or (step["type"] == "Strip" and not step["stop"])
        if step["type"] not in _LOCAL or (joined and not whole):
            return False
        joined |= step["type"] in ("Fuse", "ByteLevel")
    return True


class Detokenizer:
    """Decodes a sequence's tokens as they come.

    What `push` has returned, joined, and `tail` are always the text of `tokenizer.decode` without special tokens.

    Args:
        goes_on: The text goes on behind another one: a space with which it begins is kept.
        exact: No space is taken out, either.
    """

    def __init__(self, tokenizer: Any, *, goes_on: bool = False, exact: bool = False) -> None:
        self._tokenizer, self._how = tokenizer, _decoding(tokenizer)
        self._cleans = self._how.cleans and not exact
        # All tokens, or the last ones where no others have a part in what comes.
        self._ids = list(self._how.before) if goes_on else []
        self._before = self._decode(self._ids) if self._ids else ""  # their text without the last one
        self._given = len(self._before)  # characters of their text that have been returned
        self.tail = ""  # text that later tokens may change

    def push(self, *tokens: int) -> str:
        """Add tokens; return the text that is settled with them."""
        new = [token for token in tokens if token not in self._how.special]
        if not new:
            return ""
        if len(new) > 1 and self._how.settles != "at once":
            self._before = self._decode([*self._ids, *new[:-1]])
        self._ids += new
        text = self._decode(self._ids)
        settled = self._settled(text)
        self._before = text
        if self._cleans:
            settled = len(self._tokenizer.clean_up_tokenization(text[: _clean_end(text, settled)]))
            text = self._tokenizer.clean_up_tokenization(text)
        piece = text[self._given : settled]
        self._given += len(piece)
        self.tail = text[self._given :]
        if len(self._ids) >= _WINDOW and self._how.settles == "at once" and not self._cleans:
            self._forget_beginning(text)
        return piece

    def _settled(self, text: str) -> int:
        """Return how many characters at the beginning of `text`, of all tokens, are settled."""
        how, end = self._how, len(text)
        if how.settles == "unknown":
            return 0
        if how.settles != "at once":
            end = _common(self._before, text)
        if run := self._byte_run():
            end = min(end, len(self._decode(self._ids[:-run])))
        if text.endswith(_INCOMPLETE):  # the last bytes may become another character
            end = min(end, len(text) - 1)
        while how.settles == "hidden" and end and not text[end - 1].isalnum():
            end -= 1
        return end

    def _byte_run(self) -> int:
        """Return the number of byte tokens at the end."""
        run = 0
        while run < len(self._ids) and self._ids[-1 - run] in self._how.byte_tokens:
            run += 1
        return run

    def _forget_beginning(self, text: str) -> None:
        """Keep the last tokens only, if `text` ends with theirs: then what comes does not depend on the others."""
        if self._byte_run() >= _KEPT:
            return
        kept = self._decode(self._ids[-_KEPT:])
        if len(kept) > len(self.tail) and text.endswith(kept):
            self._ids, self._given = self._ids[-_KEPT:], len(kept) - len(self.tail)

    def _decode(self, ids: list[int]) -> str:
        settings = {"clean_up_tokenization_spaces": False} if self._how.cleans else {}
        return self._tokenizer.decode(ids, skip_special_tokens=True, **settings)  # type: ignore[no-any-return]


def _common(first: str, second: str) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _clean_end(text: str, end: int) -> int:
    """Return from where on `clean_up_tokenization` may treat `text[:end]` in another way if more follows.

    It replaces texts that begin with a space, and of whose inner characters there are but four: what it may still find
    begins at the first space behind all others.
    """
    settled = text[:end]
    space = settled.find(" ", len(settled.rstrip(" 'nvr")))
    return end if space < 0 else space


class StopSearch:
    """Finds non-empty stop strings in a text that comes in pieces, in amortised constant time per character and string.

    `cut` is the number of shown characters before the first one found; None if there is none so far.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._searches = [_Search(text) for text in stop]
        self._shown: list[_Search] = []  # in the shown text alone, once there are hidden pieces
        self.cut: int | None = None
        self._length = 0
        self._hidden: list[tuple[int, int]] = []  # beginning and length of each hidden piece

    @property
    def found(self) -> bool:
        return self.cut is not None

    @property
    def held_back(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return max((search.matched for search in [*self._searches, *self._shown]), default=0)

    def push(self, piece: str, tail: str = "", *, hidden: bool = False, counts: bool = True) -> None:
        """Add a piece to the text, unless a stop string has been found; also look for one that ends in `tail`.

        Args:
            tail: Text behind the piece that may still change.
            hidden: The piece is not shown, such as a special token's text. Stop strings are found with it and without.
            counts: Strings that end in the piece or the tail are found; otherwise they are passed over.
        """
        if hidden and piece:
            self._shown = self._shown or [copy(search) for search in self._searches]
            self._hidden.append((self._length, len(piece)))
        in_shown = [] if hidden else [(search, self._before(self._length)) for search in self._shown]
        for search, start in [*((one, self._length) for one in self._searches), *in_shown]:
            end = search.push(piece, counts=counts)
            if not end and tail and counts and (end := copy(search).push(tail)):
                end += len(piece)
            if end:
                place = start + end - len(search.wanted)
                cut = self._before(place) if start == self._length else place
                self.cut = cut if self.cut is None else min(cut, self.cut)
        self._length += len(piece)

    def _before(self, place: int) -> int:
        """Return the number of shown characters before a position."""
        return place - sum(min(max(place - begin, 0), length) for begin, length in self._hidden)


class _Search:
    """Knuth-Morris-Pratt search; `matched` is the longest prefix of `wanted` with which the text ends."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self._borders = wanted, _borders(wanted)
        self.matched = 0

    def push(self, piece: str, *, counts: bool = True) -> int:
        """Add a piece; return the characters of it up to a match's end, after which the search is over, or 0.

        If the piece does not `count`, matches that end in it are passed over.
        """
        for place, character in enumerate(piece, start=1):
            self.matched = _next(self.wanted, self._borders, self.matched, character)
            if self.matched == len(self.wanted):
                if counts:
                    return place
                self.matched = self._borders[-1]
        return 0


def _borders(wanted: str) -> tuple[int, ...]:
    """Return, for each prefix of a string, the length of its longest border."""
    borders = [0]
    for character in wanted[1:]:
        borders.append(_next(wanted, borders, borders[-1], character))
    return tuple(borders)


def _next(wanted: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Return how many characters of `wanted` are matched after one more character of the text."""
    while matched and wanted[matched] != character:
        matched = borders[matched - 1]
    return matched + (wanted[matched] == character)
