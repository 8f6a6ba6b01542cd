"""`memory`: drafts what followed the last tokens in any text that this engine has decoded, or was told (`remember`).

Rows of a job resemble each other: samples of one prompt, a common template, quotes of the same tables. After
SuffixDecoding (arXiv 2411.04975), which weighs continuations by frequency. Here matches vote, longer ones with more
weight, and trust in a match length is learned from acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drafter.devices import send
from drafter.drafters.contract import (
    Ask,
    Committed,
    DraftContext,
    DraftSpec,
    Ids,
    Loading,
    Loan,
    MemorySize,
    TextMemory,
)
from drafter.drafters.slots import SlotObjects
from drafter.drafters.text_queue import TextQueue
from drafter.requests import Request
from drafter.tree.token_tree import TokenTree, from_nodes

Tokens = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

CONTEXT = 8
"""Tokens that are compared; longer matches count as this long."""
NOTHING = -1
"""Missing token, position or block."""
_BLOCK = 128  # tokens; more than any continuation has
_OF_ALL = 0  # group of texts that any text may draft from
_ORDERS = (1, 2, 4)  # lengths of lookup keys. Short ones occur often, where the newest positions are not the best.
_NEWEST = 16  # positions kept per key
_TOKENS_PER_BUCKET = 8  # tokens of capacity per hash bucket; most pairs of tokens recur


@dataclass
class Text:
    """A text that is being written, at `filled` of its newest `block`. Only texts of the same `group` are found for it.

    `recent` are its last tokens, at most `CONTEXT`.
    """

    group: int = _OF_ALL
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
    """Texts in bounded memory, as the ids of their `TextKey`, with a lookup of what followed some tokens.

    Hash tables map a text's last one, two and four tokens to the newest positions where these occurred. Positions are
    compared token by token, so stale entries are harmless. Unused blocks are evicted first (CLOCK, Corbató 1968; each
    use is another chance).

    Args:
        capacity: Tokens of all texts together.
        writers: Texts written at the same time at most.
    """

    def __init__(self, capacity: int, writers: int = 1) -> None:
        blocks = max(-(-capacity // _BLOCK), 2 * writers)
        buckets = 1 << (blocks * _BLOCK // _TOKENS_PER_BUCKET).bit_length()
        self._tokens = np.full(blocks * _BLOCK, NOTHING)
        self._next = np.full(blocks, NOTHING, np.int32)
        self._previous = np.full(blocks, NOTHING, np.int32)
        self._groups = np.zeros(blocks, np.int64)
        self._uses = np.zeros(blocks, np.int32)
        self._written = np.zeros(blocks, np.bool_)  # in use by an unfinished text, or left to the next one
        self._left: list[tuple[int, int]] = []  # blocks with room behind a finished text, and where it begins
        self._places = np.full((len(_ORDERS), buckets, _NEWEST), NOTHING, np.int32)
        self._ends = np.zeros((len(_ORDERS), buckets), np.int64)
        self._hand = 0
        self.filled = 0  # tokens

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def append(self, texts: Sequence[Text], tokens: Sequence[Sequence[int]]) -> None:
        contexts, groups, places = [], [], []
        for text, new in zip(texts, tokens, strict=True):
            if not len(new):
                continue
            before = NOTHING if text.block == NOTHING else text.block * _BLOCK + text.filled - 1
            written = self._write(text, np.asarray(new, np.int64))
            known = [NOTHING] * (CONTEXT - len(text.recent)) + [*text.recent, *new]
            # A position is indexed once its continuation is known.
            before_new = np.array(known[CONTEXT - max(_ORDERS) : -1], np.int64)
            contexts.append(np.lib.stride_tricks.sliding_window_view(before_new, max(_ORDERS)))
            groups.append(np.full(len(new), text.group))
            places.append(np.concatenate([[before], written[:-1]]))
            text.recent = [*text.recent, *new][-CONTEXT:]
        if contexts:
            self._enter(np.concatenate(contexts), np.concatenate(groups), np.concatenate(places))

    def end(self, text: Text) -> None:
        """Finish a text, so that another one of all can go on in its last block, or else this can be evicted."""
        room = text.filled + 1  # one place stays empty between two texts
        if text.block != NOTHING and text.group == _OF_ALL and room < _BLOCK:
            self._left.append((text.block, room))
        elif text.block != NOTHING:
            self._written[text.block] = False
        text.block, text.filled, text.recent = NOTHING, 0, []

    def credit(self, blocks: Places) -> None:
        """Count a use of each of `blocks` `[M]`, whose continuation was accepted."""
        np.add.at(self._uses, blocks, 1)

    def _write(self, text: Text, new: Tokens) -> Places:
        places = []
        while len(new):
            if text.block == NOTHING and text.group == _OF_ALL and self._left:
                text.block, text.filled = self._left.pop()
            elif text.block == NOTHING or text.filled == _BLOCK:
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
        tails = np.array([[NOTHING] * (CONTEXT - len(text.recent)) + text.recent for text in texts], np.int64)
        groups = np.array([text.group for text in texts])
        places = self._candidates(tails, groups)
        lengths = self._matched(places, tails, groups)
        newest_first = np.arange(places.shape[1])
        order = np.argsort(-lengths * len(newest_first) + newest_first, axis=1, kind="stable")[:, :most]
        places, lengths = np.take_along_axis(places, order, 1), np.take_along_axis(lengths, order, 1)
        paths = self._tokens_at(places[:, :, None] + np.arange(1, depth + 1), places[:, :, None], self._next)
        # A continuation ends before what is missing, or is the place of a span (see `Prompt.key`), which has no token.
        paths = np.where(np.logical_and.accumulate(paths >= 0, -1) & (lengths > 0)[:, :, None], paths, NOTHING)
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


CAPACITY = 1_000_000
"""Tokens that are remembered, at about 36 bytes each."""
_DEPTH = 16  # longest continuation; in copied text all of it is accepted
_MATCHES = 16  # continuations that vote
_WEIGHT = 2.0  # of a match relative to one a token shorter
_TOLD_AT_ONCE = 2048  # tokens of other texts indexed per step, to bound the step's latency
_TOLD_WRITERS = 8  # other texts written at the same time
_BELIEF = 4  # prior: tokens per match length assumed tried, half of them accepted


@dataclass
class _Row:
    """A text in a slot."""

    text: Text
    trust: Trust
    unread: list[int] = field(default_factory=list)  # not yet indexed: larger pieces are cheaper
    proposed: int | None = None  # its row in the last matches, until acceptance is known


class MemoryDrafter(TextMemory):
    """Drafts trees of the continuations of earlier texts, of `capacity` tokens together.

    `isolated`: never draft from another request's text; response times would leak it. A request with a salt never does.
    """

    def __init__(self, nodes: int = 16, capacity: int = CAPACITY, *, isolated: bool = False) -> None:
        self.spec = DraftSpec(nodes, min(nodes, _DEPTH), graph_safe=False)
        self._capacity, self._isolated, self._groups = capacity, isolated, itertools.count(1)
        self._trust = Trust(CONTEXT + self.spec.max_depth)
        self._told = TextQueue(capacity)

    @property
    def memory(self) -> MemorySize:
        return MemorySize(self._index.filled, self._index.nbytes, 0 if self._isolated else self._capacity)

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        if not self._isolated:
            self._told.put(texts)

    def open(self, loan: Loan) -> None:
        self._index = SuffixIndex(self._capacity, loan.slots + _TOLD_WRITERS)
        self._rows = SlotObjects(loan.slots, self._begin, self._end)
        self.slots = [self._rows]

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        rows, device = self._rows.rows[: len(context.tokens)], context.tokens.device
        self._read_told()
        self._read(self._rows.rows)
        texts = [row.text for row in rows]
        self._matches = self._index.look_up(texts, min(ask.nodes, self.spec.max_depth), _MATCHES)
        for place, row in enumerate(rows):
            row.proposed = place
        candidates = vote(self._matches, np.stack([row.trust.log_shares() for row in rows]))
        tokens, parents, depths, log_probs = (send(torch.from_numpy(part), device) for part in candidates)
        return from_nodes(context.pending, tokens, parents, depths, log_probs, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        useful = []
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            row = self._rows.rows[slot]
            row.unread += tokens
            place, row.proposed = row.proposed, None
            if place is None or not tokens:
                continue
            lengths, paths = self._matches.lengths[place], self._matches.paths[place]
            useful.append(self._matches.blocks[place, paths[:, 0] == tokens[0]])
            row.trust.learn(int(lengths[0]), paths[0].tolist(), tokens)
        if useful:
            self._index.credit(np.concatenate(useful))

    def _begin(self, text: Ids, request: Request | None) -> _Row:
        known = text if request is None else request.key(text).ids
        if self._isolated or (request is not None and request.salt):
            return _Row(Text(next(self._groups)), Trust(CONTEXT + self.spec.max_depth), known.tolist())
        return _Row(Text(), self._trust, known.tolist())

    def _end(self, row: _Row) -> None:
        self._read([row])
        self._index.end(row.text)

    def _read(self, rows: Sequence[_Row]) -> None:
        self._index.append([row.text for row in rows], [row.unread for row in rows])
        for row in rows:
            row.unread = []

    def _read_told(self) -> None:
        told = self._told.take(_TOLD_AT_ONCE)
        for start in range(0, len(told), _TOLD_WRITERS):
            some = told[start : start + _TOLD_WRITERS]
            texts = [Text() for _ in some]
            self._index.append(texts, [tokens.tolist() for tokens in some])
            for text in texts:
                self._index.end(text)


class Trust:
    """Acceptance rate of a match's next token, by match length; accepted tokens make a match longer."""

    def __init__(self, longest: int) -> None:
        self._tried = np.full(longest + 1, _BELIEF, np.float64)
        self._true = self._tried / 2

    def log_shares(self) -> npt.NDArray[np.float64]:
        return np.log(self._true / self._tried)

    def learn(self, length: int, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare the continuation of a match of `length` with the tokens that came; 0 is no match."""
        for place, (drafted, came) in enumerate(zip(path, tokens, strict=False) if length else ()):
            if drafted == NOTHING:
                return
            self._tried[length + place] += 1
            if drafted != came:
                return
            self._true[length + place] += 1


def vote(matches: Matches, log_trust: npt.NDArray[np.float64]) -> tuple[npt.NDArray[Any], ...]:
    """Merge continuations into candidate nodes, each as probable as the share of the weight that goes through it.

    Args:
        matches: Of B texts, C each with U tokens.
        log_trust: `[B, L]` log acceptance rate of one token, by match length.

    Returns:
        Tokens, parents, depths and log-probabilities `[B, U · C]`, as `from_nodes` takes them.
    """
    lengths, paths = matches.lengths, matches.paths
    batch, count, depth = paths.shape
    exists = paths != NOTHING
    weights = np.where(lengths > 0, _WEIGHT**lengths, 0.0)
    # [B, C, C', U]: two continuations agree up to a token.
    same = np.logical_and.accumulate(
        (paths[:, :, None] == paths[:, None]) & exists[:, :, None] & exists[:, None], axis=-1
    )
    share = (same * weights[:, None, :, None]).sum(2) / np.maximum(weights.sum(1), 1e-9)[:, None, None]
    right = np.cumsum(np.take_along_axis(log_trust, lengths.max(1)[:, None] + np.arange(depth), 1), axis=1)
    first = same.argmax(2)  # of continuations with the same prefix only the first makes a node
    is_node = exists & (first == np.arange(count)[:, None])
    with np.errstate(divide="ignore"):
        log_probs = np.where(is_node, np.log(share) + right[:, None], -np.inf)
    above = np.concatenate([np.full((batch, count, 1), -1), first[:, :, :-1] + np.arange(depth - 1) * count], axis=2)

    depths = np.broadcast_to(np.arange(1, depth + 1), paths.shape)
    parts = (paths.astype(np.int64), above, depths, log_probs.astype(np.float32))
    # Parents before children.
    return tuple(np.ascontiguousarray(part.swapaxes(1, 2).reshape(batch, -1)) for part in parts)


def memory(loading: Loading) -> MemoryDrafter:
    return MemoryDrafter(loading.nodes, isolated=loading.isolated)
