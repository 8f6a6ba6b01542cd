"""`cacheback`: draft trees from LRU tables of token n-grams (Cacheback, arXiv 2511.21699). Needs no training."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loading, Loan
from drafter.drafters.slots import SlotObjects
from drafter.methods.cacheback.frozen_table import FrozenTable, Gram, Table, load_table
from drafter.requests import Request
from drafter.text.tokenizers import load_tokenizer, vocabulary_digest
from drafter.tree.paths import RowDrafts
from drafter.tree.token_tree import TokenTree, from_rows


class LruTable(Table):
    """LRU table of at most `leaders` leaders with `followers` followers each. A window slides over each text."""

    def __init__(self, leaders: int, followers: int, leader_length: int = 1, follower_length: int = 3) -> None:
        self._most_leaders, self._most_followers = leaders, followers
        self.leader_length, self.window = leader_length, leader_length + follower_length
        # Newest last, in both. Python's garbage collector does not look at tuples of numbers, as it does at dicts.
        self._followers: OrderedDict[Gram, tuple[Gram, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def learn(self, tokens: Sequence[int]) -> None:
        """Slide the window over `tokens`. A continued text must begin with its last `window - 1` known tokens."""
        for start in range(len(tokens) - self.window + 1):
            end = start + self.leader_length
            self._use(tuple(tokens[start:end]), tuple(tokens[end : start + self.window]))

    def followers(self, leader: Gram) -> Iterator[Gram]:
        return reversed(self._followers.get(leader, ()))

    def _use(self, leader: Gram, follower: Gram) -> None:
        others = (one for one in self._followers.pop(leader, ()) if one != follower)
        self._followers[leader] = (*others, follower)[-self._most_followers :]
        if len(self._followers) > self._most_leaders:
            self._followers.popitem(last=False)


_DEPTH = 16  # longest draft path
_LENGTHS = ((8, 1), (4, 1), (2, 1), (1, 3))
"""(leader, follower) tokens, in lookup order; the last are the published ones."""
_TAIL = max(map(sum, _LENGTHS)) - 1  # tokens kept of a text so that, with new ones, they cover all new windows
_OWN_LEADERS, _SHARED_LEADERS, _FOLLOWERS = 4096, 1 << 16, 8
"""Leaders of a table of a text and of one of all texts, and followers of each."""
_UNREAD = 1 << 12  # tokens of ended texts waiting to be learned; the oldest are dropped
_FIRST = {8: math.log(0.9), 4: math.log(0.8), 2: math.log(0.5), 1: math.log(0.3)}
"""Log-probability of the first token of the first follower, by leader length."""
_OLDER, _FADING = math.log(0.6), math.log(0.5)
"""Log-probability lost per rank of a first token, and per further token of a follower. The budget calibrates
probabilities, so only their order matters.
"""


@dataclass
class _Text:
    """A text in a slot, as the ids of its `TextKey`, its own tables and those that it shares.

    `tail` was learned last; `unread` tokens are learned lazily before the next draft.
    """

    shared: Sequence[LruTable]
    tables: list[LruTable] = field(default_factory=lambda: _tables(_OWN_LEADERS))
    tail: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)

    def teach(self) -> None:
        known, tokens = len(self.tail), [*self.tail, *self.unread]
        for table in (*self.tables, *self.shared):
            table.learn(tokens[max(0, known + 1 - table.window) :])


class CachebackDrafter(Drafter):
    """Drafts trees of recent n-grams, and after them of a `frozen` table of a corpus.

    `isolated`: never draft from another request's text; response times would leak it. A request with a salt never does.
    A frozen table is no such text.
    """

    def __init__(self, nodes: int = 16, *, isolated: bool = False, frozen: FrozenTable | None = None) -> None:
        self.spec = DraftSpec(nodes, min(nodes, _DEPTH), graph_safe=False)
        self._frozen = frozen
        self._shared = [] if isolated else _tables(_SHARED_LEADERS)

    def open(self, loan: Loan) -> None:
        self._ended: deque[_Text] = deque()
        self._ended_tokens = 0
        self._texts = SlotObjects(loan.slots, self._begin, self._end)
        self.slots = [self._texts]

    def prepare(self, context: DraftContext) -> None:
        for text in self._ended:
            text.teach()
        self._ended.clear()
        self._ended_tokens = 0
        for text in self._texts.rows:
            if text.unread:
                text.teach()
                text.tail, text.unread = [*text.tail, *text.unread][-_TAIL:], []

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        grown = [
            grow(self._asked(text), text.tail, ask.nodes, self.spec.max_depth)
            for text in self._texts.rows[: len(context.tokens)]
        ]
        return from_rows(context.pending, grown, ask.nodes + 1)

    def observe(self, committed: Committed) -> None:
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            self._texts.rows[slot].unread += tokens

    def _asked(self, text: _Text) -> list[Table]:
        """Tables in lookup order: longer leaders first; at equal length the text's own, the shared, the frozen."""
        frozen = [] if self._frozen is None else [self._frozen]
        return sorted([*text.tables, *text.shared, *frozen], key=lambda table: -table.leader_length)

    def _begin(self, text: Ids, request: Request | None) -> _Text:
        known = text if request is None else request.key(text).ids
        alone = request is not None and request.salt
        return _Text([] if alone else self._shared, unread=known.tolist())

    def _end(self, text: _Text) -> None:
        if text.unread and text.shared:
            text.tables = []
            self._ended.append(text)
            self._ended_tokens += len(text.unread)
            while self._ended_tokens > _UNREAD:
                self._ended_tokens -= len(self._ended.popleft().unread)


def grow(tables: Sequence[Table], tail: Sequence[int], nodes: int, depth: int) -> RowDrafts:
    """Expand path ends best first, until no other end could yield one of the best `nodes` nodes.

    `tables` are in lookup order, longest leaders first; `tail` ends the text; `depth` is the deepest level.
    """
    found, children, followed = RowDrafts(), dict[tuple[int, int], int](), set[int]()
    longest, order = max(table.leader_length for table in tables), itertools.count()
    # A heap of (−log-probability, tie-breaker, node, last tokens).
    ends = [(0.0, next(order), -1, tuple(tail[-longest:]))]
    while ends:
        cost, _, start, before = heapq.heappop(ends)
        if start in followed:  # reached before with at least this probability
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
                if below == depth or token < 0:  # the place of a span has no token; see `Prompt.key`
                    break
                log_prob += _FADING if place else 0.0
                # Followers may share a prefix: the most probable counts, but no child exceeds its parent.
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
    """Return followers of a text's end, likeliest first, each with the length of its longest leader."""
    found: dict[Gram, int] = {}
    for table in tables:
        for follower in table.followers(tail[-table.leader_length :]):
            found.setdefault(follower, table.leader_length)
    return found


def _tables(leaders: int) -> list[LruTable]:
    return [LruTable(leaders, _FOLLOWERS, *lengths) for lengths in _LENGTHS]


def cacheback(loading: Loading) -> CachebackDrafter:
    return CachebackDrafter(loading.nodes, isolated=loading.isolated)


def with_frozen_table(path: str, loading: Loading) -> CachebackDrafter:
    """Load `cacheback:PATH`, with a frozen table; raise `LoadError` if it is damaged or of other tokens."""
    target = loading.base
    table = load_table(path, vocabulary_digest(load_tokenizer(target.name)), target.vocab_size)
    return CachebackDrafter(loading.nodes, isolated=loading.isolated, frozen=table)
