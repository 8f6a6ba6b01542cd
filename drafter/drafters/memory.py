"""`memory`: what followed the last tokens where these were seen before, in any text that this engine has decoded?

The rows of a job resemble each other: samples of one prompt, one template for all, answers that quote the same tables.
So a row drafts from what the others have said, running and finished, and from its own text. Tokens do not change by it.

After SuffixDecoding (arXiv 2411.04975), which weighs continuations by how often they came. Here the matches vote,
longer ones with more weight, and what a match of some length is worth is learned from what the base accepts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.drafters.suffix_index import CONTEXT, NOTHING, Matches, SuffixIndex, Text
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import from_nodes

CAPACITY = 1_000_000
"""Tokens that are remembered; each takes about 24 bytes."""
_DEPTH = 16
"""Tokens of a continuation at most: where a text is copied, all of them come true."""
_MATCHES = 8
"""Continuations that vote."""
_WEIGHT = 2.0
"""Weight of a match relative to one that is a token shorter."""
_BELIEF = 4
"""Tokens of each match length that are taken to have been tried before the first one; half of them came true."""


_Number = TypeVar("_Number", np.int64, np.float32)


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
        self._capacity, self._groups = capacity, itertools.count(1) if isolated else itertools.repeat(0)
        self._trust = Trust(CONTEXT + self.spec.max_depth)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._index.nbytes

    def open(self, loan: Loan) -> None:
        """Make room for the texts."""
        self._index = SuffixIndex(self._capacity, loan.slots)
        self._texts = [self._new_text() for _ in range(loan.slots)]
        self._unread: list[list[int]] = [[] for _ in range(loan.slots)]  # in many small pieces it would cost more
        self._proposed: dict[int, int] = {}  # slot → row of the matches

    def enter(self, slot: int, text: Ids) -> None:
        """Let a text begin in `slot`."""
        self._replace(slot, self._new_text())
        self._unread[slot] = text.tolist()

    def move(self, source: int, target: int) -> None:
        """Let the text in slot `source` go on in slot `target`."""
        text, self._texts[source] = self._texts[source], self._new_text()
        unread, self._unread[source] = self._unread[source], []
        self._replace(target, text)
        self._unread[target] = unread
        if source in self._proposed:
            self._proposed[target] = self._proposed.pop(source)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a row without a match gets a lone root."""
        rows, device = len(context.tokens), context.tokens.device
        self._read()
        self._matches = self._index.look_up(self._texts[:rows], min(ask.nodes, self.spec.max_depth), _MATCHES)
        self._proposed = {slot: slot for slot in range(rows)}
        candidates = vote(self._matches, self._trust.log_shares())
        tokens, parents, depths, log_probs = (send(torch.from_numpy(part), device) for part in candidates)
        return from_nodes(context.pending, tokens, parents, depths, log_probs, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        """Remember what a step added, and learn which matches were right."""
        learning = [
            (self._proposed.pop(slot), tokens)
            for slot, tokens in zip(committed.slots, committed.tokens, strict=True)
            if slot in self._proposed
        ]
        useful = [
            self._matches.blocks[row, self._matches.paths[row, :, 0] == tokens[0]] for row, tokens in learning if tokens
        ]
        if useful:
            self._index.credit(np.concatenate(useful))
        for row, tokens in learning:
            self._trust.learn(int(self._matches.lengths[row, 0]), self._matches.paths[row, 0].tolist(), tokens)
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            self._unread[slot] += tokens

    def _new_text(self) -> Text:
        return Text(next(self._groups))

    def _read(self) -> None:
        """Enter into the index what has come since."""
        self._index.append(self._texts, self._unread)
        self._unread = [[] for _ in self._texts]

    def _replace(self, slot: int, text: Text) -> None:
        """Let another text be in `slot`; what came of the one before is remembered."""
        self._index.append([self._texts[slot]], [self._unread[slot]])
        self._unread[slot] = []
        self._index.end(self._texts[slot])
        self._texts[slot] = text
        self._proposed.pop(slot, None)


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
        log_trust: Log of how often a match of each length is right about one token.

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
    right = np.cumsum(log_trust[lengths.max(1)[:, None] + np.arange(depth)], axis=1)
    first = same.argmax(2)  # of several continuations with the same beginning only the first makes a node
    is_node = exists & (first == np.arange(count)[:, None])
    with np.errstate(divide="ignore"):
        log_probs = np.where(is_node, np.log(share) + right[:, None], -np.inf)
    above = np.concatenate([np.full((batch, count, 1), -1), first[:, :, :-1] + np.arange(depth - 1) * count], axis=2)

    def flat(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        return np.ascontiguousarray(values.swapaxes(1, 2).reshape(batch, -1))  # parents before children

    depths = np.broadcast_to(np.repeat(np.arange(1, depth + 1), count), (batch, count * depth)).copy()
    return flat(paths.astype(np.int64)), flat(above), depths, flat(log_probs.astype(np.float32))
