"""A table of token n-grams that keeps what was used last: what has followed some tokens, newest first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loading, Loan
from drafter.methods.cacheback.frozen_table import FrozenTable, Gram, Table, Vocabulary, load_table
from drafter.target.loading import load_tokenizer
from drafter.text.streaming import vocabulary_digest
from drafter.tree.token_tree import TokenTree, from_nodes


class LruTable(Table):
    """From *leaders*, the last tokens of a text, to *followers*, the tokens after them (arXiv 2511.21699).

    A window slides over every text, and each place is a use of a leader and of its follower. A leader has a bounded
    number of followers, and the table of leaders. What was used least recently falls out.

    Args:
        leaders: Leaders at most.
        followers: Followers of a leader at most.
        leader_length: Tokens of a leader.
        follower_length: Tokens of a follower.
    """

    def __init__(self, leaders: int, followers: int, leader_length: int = 1, follower_length: int = 3) -> None:
        self._most_leaders, self._most_followers = leaders, followers
        self.leader_length, self.window = leader_length, leader_length + follower_length
        # The newest is last in both.
        self._followers: OrderedDict[Gram, dict[Gram, None]] = OrderedDict()

    def __len__(self) -> int:
        """Leaders there are."""
        return len(self._followers)

    def learn(self, tokens: Sequence[int]) -> None:
        """Slide the window over `tokens`; those of a text that goes on begin with its last `window - 1` known ones."""
        for start in range(len(tokens) - self.window + 1):
            end = start + self.leader_length
            self._use(tuple(tokens[start:end]), tuple(tokens[end : start + self.window]))

    def followers(self, leader: Gram) -> Iterator[Gram]:
        """The followers of a leader, newest first."""
        return reversed(self._followers.get(leader, ()))

    def _use(self, leader: Gram, follower: Gram) -> None:
        followers = self._followers.setdefault(leader, {})
        self._followers.move_to_end(leader)
        followers.pop(follower, None)
        followers[follower] = None
        if len(followers) > self._most_followers:
            del followers[next(iter(followers))]
        if len(self._followers) > self._most_leaders:
            self._followers.popitem(last=False)


# ---- `cacheback`: a tree out of tables of recent n-grams (Cacheback, arXiv 2511.21699). Needs no training.

_DEPTH = 16
"""Draft tokens of a path at most."""
_LENGTHS = ((8, 1), (4, 1), (2, 1), (1, 3))
"""Tokens of a leader and of a follower, in the order in which tables are asked; the last are the published ones."""
_TAIL = max(map(sum, _LENGTHS)) - 1
"""Last tokens of a text that are kept: with those that come they are all windows that are new."""
_OWN_LEADERS, _SHARED_LEADERS, _FOLLOWERS = 4096, 1 << 16, 8
"""Leaders of a table of a text and of one of all texts, and followers of each."""
_UNREAD = 1 << 12
"""Tokens of ended texts that are kept until the next draft, to be learned: the oldest are left out."""
_FIRST = {8: math.log(0.9), 4: math.log(0.8), 2: math.log(0.5), 1: math.log(0.3)}
"""Log-probability of the first token of the first follower, by the tokens of the leader."""
_OLDER, _FADING = math.log(0.6), math.log(0.5)
"""What each later first token loses, and what each further token of a follower does. The budget calibrates
probabilities, so only their order matters."""


@dataclass
class _Text:
    """A text in a slot.

    Args:
        tables: Its own, of what is learned of it.
        tail: The last tokens of that.
        unread: What has come since. It is learned before the next draft: whoever never drafts need not learn.
    """

    tables: list[LruTable] = field(default_factory=lambda: _tables(_OWN_LEADERS))
    tail: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)

    def teach(self, tables: Sequence[LruTable]) -> None:
        """Let tables learn what is unread."""
        known, tokens = len(self.tail), [*self.tail, *self.unread]
        for table in tables:
            table.learn(tokens[max(0, known + 1 - table.window) :])


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
        self._shared = [] if isolated else _tables(_SHARED_LEADERS)

    def open(self, loan: Loan) -> None:
        """Make room for the texts."""
        self._texts = [_Text() for _ in range(loan.slots)]
        self._ended: deque[_Text] = deque()
        self._ended_tokens = 0

    def enter(self, slot: int, text: Ids) -> None:
        """Let a text begin in `slot`."""
        self._replace(slot, _Text(unread=text.tolist()))

    def move(self, source: int, target: int) -> None:
        """Let the text in slot `source` go on in slot `target`."""
        self._replace(target, self._texts[source])
        self._texts[source] = _Text()

    def prepare(self, context: DraftContext) -> None:
        """Learn what has come since the last draft."""
        for text in self._ended:
            text.teach(self._shared)
        self._ended.clear()
        self._ended_tokens = 0
        for text in self._texts:
            if text.unread:
                text.teach([*text.tables, *self._shared])
                text.tail, text.unread = [*text.tail, *text.unread][-_TAIL:], []

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a row whose last token is new gets a lone root."""
        grown = [
            grow(self._asked(text), text.tail, ask.nodes, self.spec.max_depth)
            for text in self._texts[: len(context.tokens)]
        ]
        tokens, parents, depths, log_probs = (
            send(torch.from_numpy(part), context.tokens.device) for part in side_by_side(grown)
        )
        return from_nodes(context.pending, tokens, parents, depths, log_probs, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        """Take note of what a step added."""
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            self._texts[slot].unread += tokens

    def _asked(self, text: _Text) -> list[Table]:
        """The tables that know a text: longer leaders first; of one length the text's own, that of all, the frozen."""
        frozen = [] if self._frozen is None else [self._frozen]
        return sorted([*text.tables, *self._shared, *frozen], key=lambda table: -table.leader_length)

    def _replace(self, slot: int, text: _Text) -> None:
        """Let another text be in `slot`. The one before is over: the tables of all texts are still to learn its end."""
        before, self._texts[slot] = self._texts[slot], text
        if before.unread and self._shared:
            before.tables = []
            self._ended.append(before)
            self._ended_tokens += len(before.unread)
            while self._ended_tokens > _UNREAD:
                self._ended_tokens -= len(self._ended.popleft().unread)


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
        tables: Asked one after another, those with the longest leaders first.
        tail: The text's last tokens.
        nodes: Draft nodes that are wanted.
        depth: No node lies deeper below the root.
    """
    found, children, followed = Candidates(), dict[tuple[int, int], int](), set[int]()
    longest, order = max(table.leader_length for table in tables), itertools.count()
    # Ends by falling log-probability: that, order of coming, node, last tokens.
    ends = [(0.0, next(order), -1, tuple(tail[-longest:]))]
    while ends:
        cost, _, start, before = heapq.heappop(ends)
        if start in followed:  # by another way, which was no less probable
            continue
        followed.add(start)
        if len(found.tokens) >= nodes and -cost <= heapq.nlargest(nodes, found.log_probs)[-1]:
            break
        ranks: dict[int, int] = {}  # of first tokens
        for follower, length in _followers(tables, before).items():
            rank = ranks.setdefault(follower[0], len(ranks))
            node, log_prob = start, -cost + _FIRST[length] + rank * _OLDER
            for place, token in enumerate(follower):
                below = 0 if node < 0 else found.depths[node]
                if below == depth:
                    break
                log_prob += _FADING if place else 0.0
                # Several followers may begin alike: the most probable counts, but no child is above its parent.
                bound = log_prob if node < 0 else min(log_prob, found.log_probs[node])
                child = children.get((node, token))
                if child is None:
                    child = children[node, token] = found.add(token, node, below + 1, bound)
                found.log_probs[child] = max(found.log_probs[child], bound)
                node = child
            else:
                end = (*before, *follower)[-longest:]
                heapq.heappush(ends, (-min(log_prob, found.log_probs[node]), next(order), node, end))
    return found


def _followers(tables: Sequence[Table], tail: Gram) -> dict[Gram, int]:
    """The followers of a text's end, likeliest first, each with the length of the longest leader that it follows."""
    found: dict[Gram, int] = {}
    for table in tables:
        for follower in table.followers(tail[-table.leader_length :]):
            found.setdefault(follower, table.leader_length)
    return found


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


def _tables(leaders: int) -> list[LruTable]:
    return [LruTable(leaders, _FOLLOWERS, *lengths) for lengths in _LENGTHS]


def cacheback(loading: Loading) -> CachebackDrafter:
    """Make the drafter `cacheback`."""
    return CachebackDrafter(loading.nodes, isolated=loading.isolated)


def with_frozen_table(path: str, loading: Loading) -> CachebackDrafter:
    """Make the drafter `cacheback:PATH`, of a table that `jobs.cache` has written.

    Raises:
        LoadError: The table cannot be read, or is of another vocabulary.
    """
    target = loading.base
    vocabulary = Vocabulary(vocabulary_digest(load_tokenizer(target.name)), target.vocab_size)
    return CachebackDrafter(loading.nodes, isolated=loading.isolated, frozen=load_table(path, vocabulary))
