"""`cacheback`: a tree out of tables of recent n-grams (Cacheback, arXiv 2511.21699). Needs no training.

The followers of a text's last token are drafted, and from the end of each of them the search goes on in the same way. A
table of the text itself is asked first, then one of all texts that this engine has decoded, and at last, where there is
one, a frozen table of a corpus. The newest followers come first, as published, but before them those that have also
followed the tokens before the last one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.drafters.tables.contract import Gram, Table
from drafter.drafters.tables.frozen_table import FrozenTable
from drafter.drafters.tables.lru_table import LruTable
from drafter.tree.token_tree import TokenTree
from drafter.tree.trie import from_nodes

_DEPTH = 16
"""Draft tokens of a path at most."""
_OWN_LEADERS, _SHARED_LEADERS, _FOLLOWERS = 4096, 1 << 16, 8
"""Leaders of the table of a text and of that of all texts, and followers of each."""
_CONTEXT = 2
"""Tokens before the leader that may tell followers apart."""
_NEWEST = (math.log(0.4), math.log(0.6), math.log(0.8))
"""Log-probability of the first follower's first token, by how many tokens before the leader agree with it."""
_OLDER, _FADING = math.log(0.6), math.log(0.9)
"""What each later follower loses, and what each further token does. The budget calibrates probabilities, so only their
order matters."""


class CachebackDrafter(Drafter):
    """Trees of recent n-grams.

    Args:
        nodes: Draft nodes of the largest tree.
        isolated: Whether no text is drafted from another one; see `MemoryDrafter`. A frozen table is no such text.
        frozen: A table of a corpus, which is asked after those of what is decoded.
    """

    def __init__(self, nodes: int = 16, *, isolated: bool = False, frozen: FrozenTable | None = None) -> None:
        self.spec = DraftSpec(nodes, min(nodes, _DEPTH), graph_safe=False)
        self._frozen = frozen
        self._shared = None if isolated else LruTable(_SHARED_LEADERS, _FOLLOWERS)

    def open(self, loan: Loan) -> None:
        """Make room for the texts."""
        self._own = [_own_table() for _ in range(loan.slots)]
        self._tails: list[list[int]] = [[] for _ in range(loan.slots)]

    def enter(self, slot: int, text: Ids) -> None:
        """Let a text begin in `slot`."""
        self._own[slot], self._tails[slot] = _own_table(), []
        self._learn(slot, text.tolist())

    def move(self, source: int, target: int) -> None:
        """Let the text in slot `source` go on in slot `target`."""
        self._own[target], self._own[source] = self._own[source], _own_table()
        self._tails[target], self._tails[source] = self._tails[source], []

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a row whose last token is new gets a lone root."""
        grown = [
            grow(self._asked(slot), self._tails[slot], ask.nodes, self.spec.max_depth)
            for slot in range(len(context.tokens))
        ]
        tokens, parents, depths, log_probs = (
            send(torch.from_numpy(part), context.tokens.device) for part in side_by_side(grown)
        )
        return from_nodes(context.pending, tokens, parents, depths, log_probs, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        """Learn what a step added."""
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            self._learn(slot, tokens)

    def _learning(self, slot: int) -> list[LruTable]:
        return [self._own[slot], *([] if self._shared is None else [self._shared])]

    def _asked(self, slot: int) -> list[Table]:
        return [*self._learning(slot), *([] if self._frozen is None else [self._frozen])]

    def _learn(self, slot: int, tokens: Sequence[int]) -> None:
        text = [*self._tails[slot], *tokens]
        for table in self._learning(slot):
            table.learn(text)
        self._tails[slot] = text[1 - self._own[slot].window :]


@dataclass(frozen=True)
class Candidates:
    """Candidate nodes of one row, parents before children; each list has one entry a node. See `from_nodes`."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, depth: int, log_prob: float) -> int:
        """Add a node; return its index."""
        for values, value in zip(vars(self).values(), (token, parent, depth, log_prob), strict=True):
            values.append(value)
        return len(self.tokens) - 1


def grow(tables: Sequence[Table], tail: Sequence[int], nodes: int, depth: int) -> Candidates:
    """Follow the likeliest ends first, from the text's, until no other end could give one of the best `nodes` nodes.

    Args:
        tables: Asked one after another; they have the same lengths of leaders.
        tail: The text's last tokens.
        nodes: Draft nodes that are wanted.
        depth: No node lies deeper below the root.
    """
    found, children = Candidates(), dict[tuple[int, int], int]()
    length, order = tables[0].leader_length, itertools.count()
    # Ends by falling log-probability: that, order of coming, node, last tokens.
    ends = [(0.0, next(order), -1, tuple(tail[-length - _CONTEXT :]))]
    while ends:
        cost, _, start, before = heapq.heappop(ends)
        if len(found.tokens) >= nodes and -cost <= heapq.nlargest(nodes, found.log_probs)[-1]:
            break
        for rank, (context, follower) in enumerate(_ranked(tables, before)):
            node, log_prob = start, -cost + _NEWEST[context] + rank * _OLDER
            for place, token in enumerate(follower):
                below = 0 if node < 0 else found.depths[node]
                if below == depth:
                    break
                log_prob += _FADING if place else 0.0
                child = children.get((node, token))
                if child is None:
                    # A node that an earlier follower has made may be less probable than its child would be by this one.
                    bound = log_prob if node < 0 else min(log_prob, found.log_probs[node])
                    child = children[node, token] = found.add(token, node, below + 1, bound)
                node = child
            else:
                end = (*before, *follower)[-length - _CONTEXT :]
                heapq.heappush(ends, (-min(log_prob, found.log_probs[node]), next(order), node, end))
    return found


def _ranked(tables: Sequence[Table], tail: Gram) -> list[tuple[int, Gram]]:
    """The followers of a text's end, likeliest first, each with how many tokens before the leader agree with it.

    A follower of the token before the leader that begins with the leader tells what came after both of them, so the
    tables know the followers in longer contexts, too. Those come first, and among equals the first table's newest.
    """
    length = tables[0].leader_length
    agreeing = [
        {
            follower[more:]
            for table in tables
            for follower in table.followers(tail[-length - more : -more])
            if len(follower) > more and follower[:more] == tail[-more:]
        }
        for more in range(1, len(tail) - length + 1)
    ]
    found = dict.fromkeys(itertools.chain.from_iterable(table.followers(tail[-length:]) for table in tables))

    def context(follower: Gram) -> int:
        """Tokens before the leader after which the follower has been seen as far as the tables tell."""
        more = 0
        for seen in agreeing:
            if follower[: len(follower) - more - 1] not in seen:
                break
            more += 1
        return more

    return sorted(((context(follower), follower) for follower in found), key=lambda one: -one[0])


def side_by_side(rows: Sequence[Candidates]) -> tuple[npt.NDArray[np.generic], ...]:
    """Tokens, parents, depths and log-probabilities of B rows as arrays `[B, M]`; what is missing has probability 0."""
    width = max(1, *(len(row.tokens) for row in rows))
    arrays: tuple[npt.NDArray[np.generic], ...] = (
        *np.zeros((3, len(rows), width), np.int64),
        np.full((len(rows), width), -np.inf, np.float32),
    )
    for place, row in enumerate(rows):
        for array, values in zip(arrays, vars(row).values(), strict=True):
            array[place, : len(values)] = values
    return arrays


def _own_table() -> LruTable:
    return LruTable(_OWN_LEADERS, _FOLLOWERS)
