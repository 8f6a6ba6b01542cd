"""Index of texts that finds earlier occurrences of some tokens, and their continuations.

Texts lie in blocks of a bounded memory. Hash tables map a text's last one, two and four tokens to the newest positions
where these occurred. Positions are compared token by token, so stale entries are harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

CONTEXT = 8
"""Tokens that are compared; longer matches count as this long."""
NOTHING = -1
"""Missing token, position or block."""
_BLOCK = 128
"""Tokens of a block; more than any continuation has."""
_ORDERS = (1, 2, 4)
"""Lengths of lookup keys. Short ones occur often, where the newest positions are not the best."""
_NEWEST = 16
"""Positions kept per key."""
_TOKENS_PER_BUCKET = 8
"""Tokens of capacity per hash bucket; most pairs of tokens recur."""


@dataclass
class Text:
    """A text that is being written.

    Args:
        group: Only texts of the same group are found for it.
        block: Of its newest token; `NOTHING` at first.
        filled: Its tokens in that block.
        recent: Its last tokens, at most `CONTEXT`.
    """

    group: int = 0
    block: int = NOTHING
    filled: int = 0
    recent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Matches:
    """Earlier occurrences of the last tokens of B texts: longest first, then newest.

    Args:
        lengths: `[B, C]` matching tokens, from 1 to `CONTEXT`; 0 for no match.
        paths: `[B, C, U]` continuations; `NOTHING` past the end.
        blocks: `[B, C]` the block of each.
    """

    lengths: Places
    paths: Tokens
    blocks: Places


class SuffixIndex:
    """Texts in bounded memory, with a lookup of what followed some tokens.

    Unused blocks are evicted first (CLOCK, Corbató 1968; each use is another chance).

    Args:
        capacity: Tokens of all texts together.
        writers: Texts written at the same time at most.
    """

    def __init__(self, capacity: int, writers: int = 1) -> None:
        blocks = max(-(-capacity // _BLOCK), 2 * writers)
        buckets = 1 << (blocks * _BLOCK // _TOKENS_PER_BUCKET).bit_length()
        self._tokens = np.full(blocks * _BLOCK, NOTHING, np.int32)
        self._next = np.full(blocks, NOTHING, np.int32)
        self._previous = np.full(blocks, NOTHING, np.int32)
        self._groups = np.zeros(blocks, np.int64)
        self._uses = np.zeros(blocks, np.int32)
        self._written = np.zeros(blocks, np.bool_)  # in use by an unfinished text
        self._places = np.full((len(_ORDERS), buckets, _NEWEST), NOTHING, np.int32)
        self._ends = np.zeros((len(_ORDERS), buckets), np.int64)
        self._hand = 0
        self.filled = 0
        """Tokens in it."""

    @property
    def capacity(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, however much is filled."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def append(self, texts: Sequence[Text], tokens: Sequence[Sequence[int]]) -> None:
        contexts, groups, places = [], [], []
        for text, new in zip(texts, tokens, strict=True):
            if not len(new):
                continue
            before = NOTHING if text.block == NOTHING else text.block * _BLOCK + text.filled - 1
            written = self._write(text, np.asarray(new, np.int32))
            known = [NOTHING] * (CONTEXT - len(text.recent)) + [*text.recent, *new]
            # A position is indexed once its continuation is known.
            before_new = np.array(known[CONTEXT - max(_ORDERS) : -1], np.int32)
            contexts.append(np.lib.stride_tricks.sliding_window_view(before_new, max(_ORDERS)))
            groups.append(np.full(len(new), text.group))
            places.append(np.concatenate([[before], written[:-1]]))
            text.recent = [*text.recent, *new][-CONTEXT:]
        if contexts:
            self._enter(np.concatenate(contexts), np.concatenate(groups), np.concatenate(places))

    def end(self, text: Text) -> None:
        """Finish a text, so that its last block can be evicted."""
        if text.block != NOTHING:
            self._written[text.block] = False
        text.block, text.filled, text.recent = NOTHING, 0, []

    def credit(self, blocks: Places) -> None:
        """Count a use of each of `blocks` `[M]`, whose continuation was accepted."""
        np.add.at(self._uses, blocks, 1)

    def _write(self, text: Text, new: Tokens) -> Places:
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
        """Evict by CLOCK: each use gives a block another chance."""
        while True:
            block, self._hand = self._hand, (self._hand + 1) % len(self._uses)
            if self._written[block]:
                continue
            if not self._uses[block]:
                return block
            self._uses[block] //= 2

    def _enter(self, contexts: Tokens, groups: Places, places: Places) -> None:
        """Index `contexts` `[M, 4]` of texts of `groups` `[M]`, which end at `places` `[M]`."""
        for table, order in enumerate(_ORDERS):
            tail = contexts[:, -order:]
            known = (tail != NOTHING).all(1) & (places != NOTHING)
            keys, where = self._keys(tail[known], groups[known]), places[known]
            # A stable sort keeps equal keys in order of arrival.
            order_of_keys = np.argsort(keys, kind="stable")
            keys, where = keys[order_of_keys], where[order_of_keys]
            ends = self._ends[table]
            turn = np.arange(len(keys)) - np.searchsorted(keys, keys)
            self._places[table][keys, (ends[keys] + turn) % _NEWEST] = where
            np.add.at(ends, keys, 1)

    def _keys(self, tails: Tokens, groups: Places) -> Places:
        """Hash `tails` `[M, order]` of texts of `groups` `[M]` to buckets `[M]`."""
        mixed = groups.astype(np.uint64)
        for column in np.moveaxis(tails, -1, 0).astype(np.uint64):
            mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        keys: Places = (mixed % np.uint64(self._ends.shape[1])).astype(np.int64)
        return keys

    def look_up(self, texts: Sequence[Text], depth: int, most: int) -> Matches:
        """Find up to C = `most` earlier occurrences per text, and the U = `depth` ≤ 128 tokens after each."""
        tails = np.array([[NOTHING] * (CONTEXT - len(text.recent)) + text.recent for text in texts], np.int32)
        groups = np.array([text.group for text in texts])
        places = self._candidates(tails, groups)
        lengths = self._matched(places, tails, groups)
        newest_first = np.arange(places.shape[1])
        order = np.argsort(-lengths * len(newest_first) + newest_first, axis=1, kind="stable")[:, :most]
        places, lengths = np.take_along_axis(places, order, 1), np.take_along_axis(lengths, order, 1)
        paths = self._tokens_at(places[:, :, None] + np.arange(1, depth + 1), places[:, :, None], self._next)
        # A continuation ends at its first missing token.
        paths = np.where(np.logical_and.accumulate(paths != NOTHING, -1) & (lengths > 0)[:, :, None], paths, NOTHING)
        return Matches(np.where(paths[:, :, 0] != NOTHING, lengths, 0), paths, places // _BLOCK)

    def _candidates(self, tails: Tokens, groups: Places) -> Places:
        """Return candidate positions `[B, M]`: longest key first, then newest."""
        found: list[Places] = []
        for table, order in reversed(list(enumerate(_ORDERS))):
            keys = self._keys(tails[:, -order:], groups)
            ages = (self._ends[table][keys][:, None] - 1 - np.arange(_NEWEST)) % _NEWEST
            new = self._places[table][keys[:, None], ages].astype(np.int64)
            for other in found:  # each position votes once
                new = np.where((new[:, :, None] == other[:, None, :]).any(2), NOTHING, new)
            found.append(new)
        return np.concatenate(found, 1)

    def _matched(self, places: Places, tails: Tokens, groups: Places) -> Places:
        """Return how many tokens up to `places` `[B, M]` match the ends of `tails` `[B, CONTEXT]`; 0 if too few."""
        seen = self._tokens_at(places[:, :, None] - np.arange(CONTEXT), places[:, :, None], self._previous)
        same = (seen == tails[:, None, ::-1]) & (seen != NOTHING)
        lengths: Places = np.logical_and.accumulate(same, -1).sum(-1)
        of_group = self._groups[places // _BLOCK] == groups[:, None]
        return np.where((places != NOTHING) & of_group & (lengths >= min(_ORDERS)), lengths, 0)

    def _tokens_at(self, wanted: Places, base: Places, neighbours: npt.NDArray[np.int32]) -> Tokens:
        """Return tokens at `wanted` `[..., K]`, which lie in the block of `base` `[..., 1]` or its neighbour."""
        block = base // _BLOCK
        beside = neighbours[block]
        offset = wanted - block * _BLOCK
        inside = (offset >= 0) & (offset < _BLOCK)
        place = np.where(inside, wanted, beside * _BLOCK + offset % _BLOCK)
        tokens: Tokens = np.where(inside | (beside != NOTHING), self._tokens[place], NOTHING)
        return tokens
