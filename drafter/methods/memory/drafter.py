"""`memory`: what followed the last tokens where these were seen before, in any text that this engine has decoded?

Texts that were decoded elsewhere can be told to it, too (`remember`).

The rows of a job resemble each other: samples of one prompt, one template for all, answers that quote the same tables.
So a row drafts from what the others have said, running and finished, and from its own text. Tokens do not change by it.

After SuffixDecoding (arXiv 2411.04975), which weighs continuations by how often they came. Here the matches vote,
longer ones with more weight, and what a match of some length is worth is learned from what the base accepts.
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
"""Tokens that are remembered; each takes about 32 bytes."""
_DEPTH = 16
"""Tokens of a continuation at most: where a text is copied, all of them come true."""
_MATCHES = 16
"""Continuations that vote."""
_WEIGHT = 2.0
"""Weight of a match relative to one that is a token shorter."""
_TOLD_AT_ONCE = 2048
"""Tokens of other texts that are entered before a step, so that no step takes much longer for them."""
_TOLD_WRITERS = 8
"""Of them so many are written at the same time."""
_BELIEF = 4
"""Tokens of each match length that are taken to have been tried before the first one; half of them came true."""


_Number = TypeVar("_Number", np.int64, np.float32)


@dataclass
class _Row:
    """A text in a slot.

    Args:
        text: What of it is in the index.
        trust: What its matches are worth.
        unread: What is not; to enter it in many small pieces would cost more.
        proposed: Its row among the last matches, until it is known which of them were right.
    """

    text: Text
    trust: Trust
    unread: list[int] = field(default_factory=list)
    proposed: int | None = None


class MemoryDrafter(Drafter):
    """Trees of the continuations of earlier texts.

    Args:
        nodes: Draft nodes of the largest tree.
        capacity: Tokens that are remembered, all texts together.
        isolated: Whether each text is drafted from itself alone. What a draft proposes can be told from how long an
            answer takes, so texts of users who must not know of each other must not meet.
    """

    def __init__(self, nodes: int = 16, capacity: int = CAPACITY, *, isolated: bool = False) -> None:
        self.spec = DraftSpec(nodes, min(nodes, _DEPTH), graph_safe=False)
        self._capacity, self._isolated, self._groups = capacity, isolated, itertools.count(1)
        self._trust = Trust(CONTEXT + self.spec.max_depth)
        self._told = TextQueue(capacity)

    @property
    def memory(self) -> DraftMemory:
        """Tokens and bytes of the index; isolated texts have no use for others."""
        return DraftMemory(self._index.filled, self._index.nbytes, 0 if self._isolated else self._capacity)

    def remember(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        """Let texts from elsewhere be entered before the next steps, unless texts are isolated."""
        if not self._isolated:
            self._told.put(texts)

    def open(self, loan: Loan) -> None:
        """Make room for the texts."""
        self._index = SuffixIndex(self._capacity, loan.slots + _TOLD_WRITERS)
        self._rows = [self._new_row() for _ in range(loan.slots)]

    def enter(self, slot: int, text: Ids) -> None:
        """Let a text begin in `slot`."""
        self._replace(slot, self._new_row())
        self._rows[slot].unread = text.tolist()

    def move(self, source: int, target: int) -> None:
        """Let the text in slot `source` go on in slot `target`."""
        self._replace(target, self._rows[source])
        self._rows[source] = self._new_row()

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a row without a match gets a lone root."""
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
        """Remember what a step added, and learn which matches were right."""
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
        """Enter into the index what has come since."""
        self._index.append([row.text for row in rows], [row.unread for row in rows])
        for row in rows:
            row.unread = []

    def _read_told(self) -> None:
        """Enter a portion of the texts from elsewhere."""
        told = self._told.take(_TOLD_AT_ONCE)
        for start in range(0, len(told), _TOLD_WRITERS):
            some = told[start : start + _TOLD_WRITERS]
            texts = [Text() for _ in some]
            self._index.append(texts, [tokens.tolist() for tokens in some])
            for text in texts:
                self._index.end(text)

    def _replace(self, slot: int, row: _Row) -> None:
        """Let another text be in `slot`; what came of the one before is remembered."""
        self._read([self._rows[slot]])
        self._index.end(self._rows[slot].text)
        self._rows[slot] = row


class Trust:
    """How often the next token of a match came true, by the length of the match.

    Args:
        longest: Of the matches: what has come true makes a match longer.
    """

    def __init__(self, longest: int) -> None:
        self._tried = np.full(longest + 1, _BELIEF, np.float64)
        self._true = self._tried / 2

    def log_shares(self) -> npt.NDArray[np.float64]:
        """Log of the share that came true, of each length."""
        return np.log(self._true / self._tried)

    def learn(self, length: int, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare how a match of `length` went on with the tokens that came; nothing if there was no match."""
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
        log_trust: `[B, L]` log of how often a match of each length is right about one token.

    Returns:
        Tokens, parents, depths and log-probabilities `[B, U · C]`, as `from_nodes` takes them.
    """
    lengths, paths = matches.lengths, matches.paths
    batch, count, depth = paths.shape
    exists = paths != NOTHING
    weights = np.where(lengths > 0, _WEIGHT**lengths, 0.0)
    # [B, C, C', U]: whether two continuations are the same up to a token.
    same = np.logical_and.accumulate(
        (paths[:, :, None] == paths[:, None]) & exists[:, :, None] & exists[:, None], axis=-1
    )
    share = (same * weights[:, None, :, None]).sum(2) / np.maximum(weights.sum(1), 1e-9)[:, None, None]
    right = np.cumsum(np.take_along_axis(log_trust, lengths.max(1)[:, None] + np.arange(depth), 1), axis=1)
    first = same.argmax(2)  # of several continuations with the same beginning only the first makes a node
    is_node = exists & (first == np.arange(count)[:, None])
    with np.errstate(divide="ignore"):
        log_probs = np.where(is_node, np.log(share) + right[:, None], -np.inf)
    above = np.concatenate([np.full((batch, count, 1), -1), first[:, :, :-1] + np.arange(depth - 1) * count], axis=2)

    def flat(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        return np.ascontiguousarray(values.swapaxes(1, 2).reshape(batch, -1))  # parents before children

    depths = np.broadcast_to(np.repeat(np.arange(1, depth + 1), count), (batch, count * depth)).copy()
    return flat(paths.astype(np.int64)), flat(above), depths, flat(log_probs.astype(np.float32))


def memory(loading: Loading) -> MemoryDrafter:
    """Make the drafter `memory`."""
    return MemoryDrafter(loading.nodes, isolated=loading.isolated)
