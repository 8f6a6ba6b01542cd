"""Grammars in Lark's notation that llguidance reads otherwise than Lark does.

llguidance takes the longest text for each terminal, and never takes it back: in `"<a>" TEXT "</a>"` a `TEXT` of any
characters takes in the end, too, and no output ends; `("a" | "ab") "b"` has no "ab". A rule that does not recurse is
regular. Written as a terminal, it has all of its texts, at the price of a larger automaton: so that is what is
compiled where random texts of it show a difference. Of each grammar a random text must end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MOST_RULES = 500
_WALKS, _LONGEST_WALK = 8, 2000
_SAMPLES, _LONGEST_SAMPLE = 24, 120
_PATIENCE = 40  # bytes of a random text after which it closes what is open
_WORDS = 0.3
_CLOSING = b"\"')]}>;\n"

_SKIPPED = re.compile(r'(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*)|(?://|#)[^\n]*')
_DEFINITION = re.compile(r"^[ \t]*[!?]*([A-Za-z_][\w-]*)[ \t]*:", re.MULTILINE)
_NOT_FLAT = re.compile(
    r"%(?!import\b)|[<>@&]|~(?![ \t]*[0-9])|\{(?![0-9])|[\w-]\[|::|^[ \t]*[!?]*[\w-]+[ \t]*\.", re.MULTILINE
)
_ALIAS = re.compile(r"->[ \t]*[\w-]+")
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def as_lark_reads(grammar: str, limits: LLParserLimits) -> str:
    """Return a grammar that has the texts that Lark's has, as far as random texts show.

    Raises:
        ValueError: No random text of it ended; the message says why that may be.
    """
    given = _Walker.of(grammar, limits)
    if given is None:  # what is wrong is said when it is compiled, or it has special tokens, which no bytes are
        return grammar
    flat = _flat(grammar)
    other = None if flat is None else _Walker.of(flat, limits)
    if flat is not None and other is not None:
        more = not all(map(given.accepts, other.texts(_SAMPLES, _LONGEST_SAMPLE)))
        if more and all(map(other.accepts, given.texts(_SAMPLES, _LONGEST_SAMPLE))):
            return flat
    if next(given.texts(_WALKS, _LONGEST_WALK), None) is None:
        if flat is not None and other is not None and next(other.texts(_WALKS, _LONGEST_WALK), None) is not None:
            return flat
        raise ValueError(
            "no text of it ends: each terminal takes all that it can, so one that something follows must not match "
            "that, too; give rules a terminal that leaves it out, such as /[^<]+/ before </a>"
        )
    return grammar


def _flat(grammar: str) -> str | None:
    """Return a grammar whose rules are terminals where they do not recurse; None if it has what terminals have not."""
    # Of the same length, so that places are the same: texts and expressions are no names.
    masked = _SKIPPED.sub(lambda found: ("\0" if found["text"] else " ") * len(found[0]), grammar)
    masked = _ALIAS.sub(lambda found: " " * len(found[0]), masked)
    grammar = "".join(one if other != " " else " " for one, other in zip(grammar, masked, strict=True))
    defined = {found[1]: found for found in _DEFINITION.finditer(masked)}
    if _NOT_FLAT.search(masked) or len(defined) > _MOST_RULES:
        return None
    ends = sorted([*(found.start() for found in defined.values()), len(masked)])
    bodies = {
        name: masked[found.end() : next(end for end in ends if end > found.start())] for name, found in defined.items()
    }
    uses = {name: {one for one in _NAME.findall(body) if one in defined} for name, body in bodies.items()}
    plain = set[str]()  # those that do not recurse: all that they use does not
    while new := {name for name in uses if name not in plain and uses[name] <= plain}:
        plain |= new
    names = {name: f"FLAT-{index}" for index, name in enumerate(defined) if name in plain}
    begins = {found.start(1): found.start() for found in defined.values()}  # before what Lark says of its trees: ?rule
    pieces, place = list[str](), 0
    for found in _NAME.finditer(masked):
        if found[0] in names:
            pieces += [grammar[place : begins.get(found.start(), found.start())], names[found[0]]]
            place = found.end()
    start = f"\nstart: {names['start']}\n" if "start" in names else ""
    return f"{''.join(pieces)}{grammar[place:]}{start}"


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


@dataclass
class _Walker:
    """Random texts of a grammar."""

    matcher: LLMatcher
    words: list[bytes]  # texts in the grammar, which a random one has by chance too rarely
    letters: frozenset[int]  # those that the grammar is written in

    @classmethod
    def of(cls, grammar: str, limits: LLParserLimits) -> _Walker | None:
        # What has no end may force the same bytes for ever, and llguidance looks for all of them.
        given = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{grammar}')
        matcher = LLMatcher(_bytes(), given, log_level=0, limits=limits)
        words = [found[1].encode() for found in re.finditer(r'"([^"\\]+)"', grammar)]
        return None if matcher.is_error() else cls(matcher, words, frozenset(grammar.encode()))

    def accepts(self, text: bytes) -> bool:
        matcher = self.matcher.deep_copy()
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    def texts(self, number: int, longest: int) -> Iterator[bytes]:
        """Yield the texts of `number` random walks that end within `longest` bytes."""
        for seed in range(number):
            if (text := self._text(Random(seed), longest)) is not None:
                yield text

    def _text(self, random: Random, longest: int) -> bytes | None:
        matcher, text = self.matcher.deep_copy(), bytearray()
        while len(text) < longest:
            if matcher.is_accepting() and (matcher.is_stopped() or random.random() < 0.5):
                return bytes(text)
            if self.words and random.random() < _WORDS:
                word = random.choice(self.words)
                if (taken := matcher.try_consume_tokens(list(word))) == len(word):
                    text += word
                    continue
                matcher.rollback(taken)
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            if not allowed or matcher.is_error():
                return bytes(text) if matcher.is_accepting() else None
            closing = [byte for byte in allowed if byte in _CLOSING] if len(text) > _PATIENCE else []
            known = [byte for byte in allowed if byte in self.letters]
            byte = random.choice(closing if closing and random.random() < 0.8 else known or allowed)
            matcher.consume_token(byte)
            text.append(byte)
        return bytes(text) if matcher.is_accepting() else None
