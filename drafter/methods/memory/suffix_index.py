"""Where in many texts some tokens have been seen before, and how the texts went on there.

The texts are kept in blocks of a bounded memory. Hash tables lead from a text's last token, its last two, and its last
four, to the newest places where these have occurred. What is found there is compared token by token, so an entry whose
block has gone to another text since can do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

CONTEXT = 8
"""Tokens that are compared: longer matches are not told apart."""
NOTHING = -1
"""Stands where there is no token, no place, or no block."""
_BLOCK = 128
"""Tokens that a text takes of the memory at a time; more than any continuation has."""
_ORDERS = (1, 2, 4)
"""Lengths of what is looked up. Few tokens have been seen often, and then the newest places are not the best ones."""
_NEWEST = 16
"""Places that are kept for the same tokens."""
_TOKENS_PER_BUCKET = 8
"""Tokens of capacity for each entry of a hash table. Few of the tokens that occur are new pairs."""


@dataclass
class Text:
    """A text that is being written.

    Args:
        group: Texts of other groups are not found for it.
        block: Where its newest token is; `NOTHING` before there is one.
        filled: Tokens of it in that block.
        recent: Its last tokens, at most `CONTEXT`.
    """

    group: int = 0
    block: int = NOTHING
    filled: int = 0
    recent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Matches:
    """Where the last tokens of B texts have been seen before: longest match first, then newest.

    Args:
        lengths: `[B, C]` how many tokens are the same there, from 1 to `CONTEXT`; 0 where there is no match.
        paths: `[B, C, U]` how it went on there; `NOTHING` past the end.
        blocks: `[B, C]` the block of each place.
    """

    lengths: Places
    paths: Tokens
    blocks: Places


class SuffixIndex:
    """Texts, as many as there is room for, and a look-up of what followed some tokens.

    When the memory is full, a block gives way that was of no use since the last time it was asked to, oldest first
    (CLOCK, Corbató 1968; each use is another chance).

    Args:
        capacity: Tokens of all texts together.
        writers: Texts that are written at the same time at most.
    """

    def __init__(self, capacity: int, writers: int = 1) -> None:
        blocks = max(-(-capacity // _BLOCK), 2 * writers)
        buckets = 1 << (blocks * _BLOCK // _TOKENS_PER_BUCKET).bit_length()
        self._tokens = np.full(blocks * _BLOCK, NOTHING, np.int32)
        self._next = np.full(blocks, NOTHING, np.int32)
        self._previous = np.full(blocks, NOTHING, np.int32)
        self._groups = np.zeros(blocks, np.int64)
        self._uses = np.zeros(blocks, np.int32)
        self._written = np.zeros(blocks, np.bool_)  # by a text that goes on
        self._places = np.full((len(_ORDERS), buckets, _NEWEST), NOTHING, np.int32)
        self._ends = np.zeros((len(_ORDERS), buckets), np.int64)
        self._hand = 0
        self.filled = 0
        """Tokens that are in it."""

    @property
    def capacity(self) -> int:
        """Tokens of all texts together."""
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that the index takes, however much is in it."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    # ---- writing

    def append(self, texts: Sequence[Text], tokens: Sequence[Sequence[int]]) -> None:
        """Let each text go on with its tokens."""
        contexts, groups, places = [], [], []
        for text, new in zip(texts, tokens, strict=True):
            if not len(new):
                continue
            before = NOTHING if text.block == NOTHING else text.block * _BLOCK + text.filled - 1
            written = self._write(text, np.asarray(new, np.int32))
            known = [NOTHING] * (CONTEXT - len(text.recent)) + [*text.recent, *new]
            # What ends at a place is entered when it is known how it goes on there.
            before_new = np.array(known[CONTEXT - max(_ORDERS) : -1], np.int32)
            contexts.append(np.lib.stride_tricks.sliding_window_view(before_new, max(_ORDERS)))
            groups.append(np.full(len(new), text.group))
            places.append(np.concatenate([[before], written[:-1]]))
            text.recent = [*text.recent, *new][-CONTEXT:]
        if contexts:
            self._enter(np.concatenate(contexts), np.concatenate(groups), np.concatenate(places))

    def end(self, text: Text) -> None:
        """Let a text be over: its last block may give way from now on."""
        if text.block != NOTHING:
            self._written[text.block] = False
        text.block, text.filled, text.recent = NOTHING, 0, []

    def credit(self, blocks: Places) -> None:
        """Count a use of each of `blocks` `[M]`: what they hold came true."""
        np.add.at(self._uses, blocks, 1)

    def _write(self, text: Text, new: Tokens) -> Places:
        """Write tokens behind a text; return where each is."""
        places = []
        while len(new):
            if text.block == NOTHING or text.filled == _BLOCK:
                self._turn_over(text)
            start = text.block * _BLOCK + text.filled
            count = min(len(new), _BLOCK - text.filled)
            self._tokens[start : start + count] = new[:count]
            places.append(np.arange(start, start + count))
            text.filled += count
            self.filled += count
            new = new[count:]
        return np.concatenate(places)

    def _turn_over(self, text: Text) -> None:
        """Give a text another block."""
        block, before = self._free_block(), text.block
        for neighbours, others in ((self._next, self._previous), (self._previous, self._next)):
            if neighbours[block] != NOTHING:
                others[neighbours[block]] = NOTHING
            neighbours[block] = NOTHING
        span = slice(block * _BLOCK, (block + 1) * _BLOCK)
        self.filled -= int(np.count_nonzero(self._tokens[span] != NOTHING))
        self._tokens[span] = NOTHING
        self._uses[block], self._groups[block] = 0, text.group
        self._written[block] = True
        if before != NOTHING:
            self._written[before] = False
            self._next[before], self._previous[block] = block, before
        text.block, text.filled = block, 0

    def _free_block(self) -> int:
        """Find the next block that is not in use: each use gives a block another chance."""
        while True:
            block, self._hand = self._hand, (self._hand + 1) % len(self._uses)
            if self._written[block]:
                continue
            if not self._uses[block]:
                return block
            self._uses[block] //= 2

    def _enter(self, contexts: Tokens, groups: Places, places: Places) -> None:
        """Note that `contexts` `[M, 4]` of texts of `groups` `[M]` end at `places` `[M]`."""
        for table, order in enumerate(_ORDERS):
            tail = contexts[:, -order:]
            known = (tail != NOTHING).all(1) & (places != NOTHING)
            keys, where = self._keys(tail[known], groups[known]), places[known]
            # Equal keys follow one another in the order in which they came.
            order_of_keys = np.argsort(keys, kind="stable")
            keys, where = keys[order_of_keys], where[order_of_keys]
            ends = self._ends[table]
            turn = np.arange(len(keys)) - np.searchsorted(keys, keys)
            self._places[table][keys, (ends[keys] + turn) % _NEWEST] = where
            np.add.at(ends, keys, 1)

    def _keys(self, tails: Tokens, groups: Places) -> Places:
        """Entries of a hash table `[M]` for `tails` `[M, order]` of texts of `groups` `[M]`."""
        mixed = groups.astype(np.uint64)
        for column in np.moveaxis(tails, -1, 0).astype(np.uint64):
            mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        keys: Places = (mixed % np.uint64(self._ends.shape[1])).astype(np.int64)
        return keys

    # ---- reading

    def look_up(self, texts: Sequence[Text], depth: int, most: int) -> Matches:
        """Find where what `texts` end in has gone on before.

        Args:
            texts: B texts.
            depth: Tokens of a continuation, U; at most 128.
            most: Matches of each text, C.
        """
        tails = np.array([[NOTHING] * (CONTEXT - len(text.recent)) + text.recent for text in texts], np.int32)
        groups = np.array([text.group for text in texts])
        places = self._candidates(tails, groups)
        lengths = self._matched(places, tails, groups)
        newest_first = np.arange(places.shape[1])
        order = np.argsort(-lengths * len(newest_first) + newest_first, axis=1, kind="stable")[:, :most]
        places, lengths = np.take_along_axis(places, order, 1), np.take_along_axis(lengths, order, 1)
        paths = self._tokens_at(places[:, :, None] + np.arange(1, depth + 1), places[:, :, None], self._next)
        # A text goes no further than its first missing token.
        paths = np.where(np.logical_and.accumulate(paths != NOTHING, -1) & (lengths > 0)[:, :, None], paths, NOTHING)
        return Matches(np.where(paths[:, :, 0] != NOTHING, lengths, 0), paths, places // _BLOCK)

    def _candidates(self, tails: Tokens, groups: Places) -> Places:
        """Places `[B, M]` where the last tokens may have been seen: for each order, newest first."""
        found: list[Places] = []
        for table, order in reversed(list(enumerate(_ORDERS))):
            keys = self._keys(tails[:, -order:], groups)
            ages = (self._ends[table][keys][:, None] - 1 - np.arange(_NEWEST)) % _NEWEST
            new = self._places[table][keys[:, None], ages].astype(np.int64)
            for other in found:  # each place has one vote
                new = np.where((new[:, :, None] == other[:, None, :]).any(2), NOTHING, new)
            found.append(new)
        return np.concatenate(found, 1)

    def _matched(self, places: Places, tails: Tokens, groups: Places) -> Places:
        """How many tokens up to `places` `[B, M]` are the last of `tails` `[B, CONTEXT]`, `[B, M]`; 0 if too few."""
        seen = self._tokens_at(places[:, :, None] - np.arange(CONTEXT), places[:, :, None], self._previous)
        same = (seen == tails[:, None, ::-1]) & (seen != NOTHING)
        lengths: Places = np.logical_and.accumulate(same, -1).sum(-1)
        of_group = self._groups[places // _BLOCK] == groups[:, None]
        return np.where((places != NOTHING) & of_group & (lengths >= min(_ORDERS)), lengths, 0)

    def _tokens_at(self, wanted: Places, base: Places, neighbours: npt.NDArray[np.int32]) -> Tokens:
        """The tokens at places `wanted` `[..., K]`, which are in the block of `base` `[..., 1]` or its neighbour."""
        block = base // _BLOCK
        beside = neighbours[block]
        offset = wanted - block * _BLOCK
        inside = (offset >= 0) & (offset < _BLOCK)
        place = np.where(inside, wanted, beside * _BLOCK + offset % _BLOCK)
        tokens: Tokens = np.where(inside | (beside != NOTHING), self._tokens[place], NOTHING)
        return tokens
