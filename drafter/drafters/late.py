"""Drafts that come from elsewhere for one row, in their own time: `Handle.draft` brings them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan, Renewal
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.slots import SlotObjects
from drafter.errors import RequestError
from drafter.requests import Request
from drafter.tree.paths import left_behind
from drafter.tree.token_tree import TokenTree, from_nodes

_WAITING = 4096  # drafts between two steps; the oldest are dropped
_FADING = 0.5
"""Log-probability lost a level: who drafted does not say how probable the tokens are, and their order is kept."""

Nodes = list[tuple[int, int, int]]
"""Token, parent among these (-1 for the text's end) and depth of each draft token."""


@dataclass
class _Row:
    """A row's output, and the draft that came last; see `Drafter.receive`."""

    request: Request | None
    output: list[int]
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    at: int = 0

    def nodes(self, depth: int) -> Nodes:
        """Return token, parent and depth of what is left of the draft below the text's end, down to `depth`."""
        if self.at > len(self.output):
            return []
        left = left_behind(self.tokens, self.parents, self.output[self.at :], depth)
        return [(self.tokens[node], parent, level) for node, parent, level in left]


class LateDrafter(Drafter):
    """Drafts what came for a row since its last draft, if it continues the row's text; other rows are not drafted for.

    `nodes` are the draft tokens of its largest tree, which may be as deep.
    """

    def __init__(self, nodes: int = 16) -> None:
        self.spec = DraftSpec(nodes, nodes, graph_safe=False)
        self._came = deque[tuple[Request, Sequence[int], Sequence[int], int]](maxlen=_WAITING)

    def open(self, loan: Loan) -> None:
        self._rows = SlotObjects(loan.slots, _begin)
        self._vocabulary = loan.base.vocab_size
        self.slots = [self._rows]

    @property
    def has_some(self) -> bool:
        """True if drafts have come since the last `take`."""
        return bool(self._came)

    def receive(self, request: Request, tokens: Sequence[int], parents: Sequence[int], at: int) -> None:
        in_order = len(tokens) == len(parents) and all(-1 <= parent < one for one, parent in enumerate(parents))
        if at < 0 or not in_order or not all(0 <= token < self._vocabulary for token in tokens):
            raise RequestError(
                f"a draft is a list of tokens below {self._vocabulary} and one of their parents, which come before "
                "them or are -1, after a number of output tokens"
            )
        self._came.append((request, tuple(tokens), tuple(parents), at))

    def observe(self, committed: Committed) -> None:
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            self._rows.rows[slot].output += tokens

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return _trees_of(self.take(len(context.tokens)), context.pending, ask.nodes)

    def take(self, rows: int) -> list[Nodes]:
        """Return the drafts that have come for the first slots, as far as they continue the texts; none comes twice."""
        for _ in range(len(self._came)):
            came = self._came.popleft()
            for row in self._rows.rows:  # of a parked one, too
                if row.request is came[0]:
                    _, row.tokens, row.parents, row.at = came
        drafts = [row.nodes(self.spec.max_depth) for row in self._rows.rows[:rows]]
        for row in self._rows.rows[:rows]:
            row.tokens = row.parents = ()
        return drafts


class BesideDrafter(MergedDrafter):
    """Lets `own` draft, but for rows that a draft has come for: of these all of it is verified, up to `nodes` tokens.

    What a budget plans, and learns, is of `own` alone. The host drafts only where a draft has come.
    """

    def __init__(self, own: Drafter, nodes: int) -> None:
        self.own, self._late, self._drafts = own, LateDrafter(nodes), list[Nodes]()
        super().__init__(own, self._late)
        self.spec = replace(self.spec, max_nodes=own.spec.max_nodes, brought=nodes, graph_safe=own.spec.graph_safe)
        self.members, self.known, self.drafts = own.members, own.known, own.drafts

    @property
    def withheld(self) -> tuple[int, ...]:
        return self.own.withheld

    def select(self, member: int) -> None:
        self.own.select(member)

    def follows(self, ask: Ask) -> bool:
        return self._late.has_some or self.own.follows(ask)

    def prepare(self, context: DraftContext) -> None:
        self.own.prepare(context)

    def renew(self) -> Renewal | None:
        return self.own.renew()

    def brought(self, rows: int) -> tuple[int, ...]:
        self._drafts = self._late.take(rows)
        counts = tuple(min(len(draft), self.spec.brought) for draft in self._drafts)
        return counts if any(counts) else ()

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return self.own.propose(context, ask)

    def with_brought(self, own: TokenTree, counts: tuple[int, ...]) -> TokenTree:
        own = own.first_rows(len(counts))
        late = _trees_of(self._drafts, own.tokens[:, 0], max(counts))
        size = max(own.size, late.size)
        came = send(torch.tensor(counts) > 0, own.tokens.device)[:, None]
        parts = zip(vars(late.padded(size)).values(), vars(own.padded(size)).values(), strict=True)
        return TokenTree(*(torch.where(came, *part) for part in parts))


def _trees_of(drafts: Sequence[Nodes], pending: Tensor, nodes: int) -> TokenTree:
    width = max(1, *map(len, drafts))
    parts = np.zeros((3, len(drafts), width), np.int64)
    log_probs = np.full((len(drafts), width), -np.inf, np.float32)
    for place, draft in enumerate(drafts):
        if draft:
            parts[:, place, : len(draft)] = np.array(draft).T
            log_probs[place, : len(draft)] = parts[2, place, : len(draft)] * -_FADING
    device = pending.device
    tokens, parents, depths, falling = (send(torch.from_numpy(part), device) for part in (*parts, log_probs))
    return from_nodes(pending, tokens, parents, depths, falling, nodes + 1)


def _begin(text: Ids, request: Request | None) -> _Row:
    return _Row(request, [] if request is None else text[len(request.prompt_ids) :].tolist())
