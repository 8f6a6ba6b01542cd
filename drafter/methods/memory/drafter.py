"""`memory`: drafts what followed the last tokens in any text that this engine has decoded, or was told (`remember`).

Rows of a job resemble each other: samples of one prompt, a common template, quotes of the same tables. After
SuffixDecoding (arXiv 2411.04975), which weighs continuations by frequency. Here matches vote, longer ones with more
weight, and trust in a match length is learned from acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftMemory, DraftSpec, Ids, Loading, Loan
from drafter.drafters.text_queue import TextQueue
from drafter.methods.memory.suffix_index import CONTEXT, NOTHING, Matches, SuffixIndex, Text
from drafter.tree.token_tree import TokenTree, from_nodes

CAPACITY = 1_000_000
"""Tokens that are remembered, at about 32 bytes each."""
_DEPTH = 16
"""Longest continuation; in copied text all of it is accepted."""
_MATCHES = 16
"""Continuations that vote."""
_WEIGHT = 2.0
"""Weight of a match relative to one a token shorter."""
_TOLD_AT_ONCE = 2048
"""Tokens of other texts indexed per step, to bound the step's latency."""
_TOLD_WRITERS = 8
"""Other texts written at the same time."""
_BELIEF = 4
"""Prior: tokens per match length assumed tried, half of them accepted."""


_Number = TypeVar("_Number", np.int64, np.float32)


@dataclass
class _Row:
    """A text in a slot.

    Args:
        text: The indexed part.
        unread: Tokens not yet indexed: larger pieces are cheaper.
        proposed: Its row in the last matches, until acceptance is known.
    """

    text: Text
    trust: Trust
    unread: list[int] = field(default_factory=list)
    proposed: int | None = None


class MemoryDrafter(Drafter):
    """Drafts trees of the continuations of earlier texts.

    Args:
        nodes: Draft nodes of the largest tree.
        capacity: Tokens remembered, all texts together.
        isolated: Never draft from another request's text; response times would leak it.
    """

    def __init__(self, nodes: int = 16, capacity: int = CAPACITY, *, isolated: bool = False) -> None:
        self.spec = DraftSpec(nodes, min(nodes, _DEPTH), graph_safe=False)
        self._capacity, self._isolated, self._groups = capacity, isolated, itertools.count(1)
        self._trust = Trust(CONTEXT + self.spec.max_depth)
        self._told = TextQueue(capacity)

    @property
    def memory(self) -> DraftMemory:
        """Size of the index, and how many other texts' tokens it wants: none if isolated."""
        return DraftMemory(self._index.filled, self._index.nbytes, 0 if self._isolated else self._capacity)

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        """Queue texts from elsewhere for the next steps, unless isolated."""
        if not self._isolated:
            self._told.put(texts)

    def open(self, loan: Loan) -> None:
        self._index = SuffixIndex(self._capacity, loan.slots + _TOLD_WRITERS)
        self._rows = [self._new_row() for _ in range(loan.slots)]

    def enter(self, slot: int, text: Ids) -> None:
        self._replace(slot, self._new_row())
        self._rows[slot].unread = text.tolist()

    def move(self, source: int, target: int) -> None:
        self._replace(target, self._rows[source])
        self._rows[source] = self._new_row()

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + ask.nodes]`; a row without a match gets a lone root."""
        rows, device = self._rows[: len(context.tokens)], context.tokens.device
        self._read_told()
        self._read(self._rows)
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
            row = self._rows[slot]
            row.unread += tokens
            place, row.proposed = row.proposed, None
            if place is None or not tokens:
                continue
            lengths, paths = self._matches.lengths[place], self._matches.paths[place]
            useful.append(self._matches.blocks[place, paths[:, 0] == tokens[0]])
            row.trust.learn(int(lengths[0]), paths[0].tolist(), tokens)
        if useful:
            self._index.credit(np.concatenate(useful))

    def _new_row(self) -> _Row:
        if self._isolated:
            return _Row(Text(next(self._groups)), Trust(CONTEXT + self.spec.max_depth))
        return _Row(Text(), self._trust)

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

    def _replace(self, slot: int, row: _Row) -> None:
        self._read([self._rows[slot]])
        self._index.end(self._rows[slot].text)
        self._rows[slot] = row


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


def vote(
    matches: Matches, log_trust: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
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

    def flat(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        return np.ascontiguousarray(values.swapaxes(1, 2).reshape(batch, -1))  # parents before children

    depths = np.broadcast_to(np.repeat(np.arange(1, depth + 1), count), (batch, count * depth)).copy()
    return flat(paths.astype(np.int64)), flat(above), depths, flat(log_probs.astype(np.float32))


def memory(loading: Loading) -> MemoryDrafter:
    return MemoryDrafter(loading.nodes, isolated=loading.isolated)
