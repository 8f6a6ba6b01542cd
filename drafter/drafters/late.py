"""Drafts that come from elsewhere for one row, in their own time: `Handle.draft` brings them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter.devices import send
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.drafters.slots import SlotObjects
from drafter.errors import RequestError
from drafter.requests import Request
from drafter.tree.token_tree import TokenTree, from_nodes

_WAITING = 4096
"""Drafts between two steps; the oldest are dropped."""
_FADING = 0.5
"""Log-probability lost a level: who drafted does not say how probable the tokens are, and their order is kept."""


@dataclass
class _Row:
    """A row's output, and the draft that came last; see `Drafter.receive`."""

    request: Request | None
    output: list[int]
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    at: int = 0

    def nodes(self, depth: int) -> list[tuple[int, int, int]]:
        """Return token, parent and depth of what is left of the draft below the text's end, down to `depth`."""
        if self.at > len(self.output):
            return []
        root = -1
        for token in self.output[self.at :]:
            children = (one for one, parent in enumerate(self.parents) if parent == root and self.tokens[one] == token)
            root = next(children, len(self.tokens))  # of which there are no children
        found: list[tuple[int, int, int]] = []
        places = {root: (-1, 0)}  # in what is left, and depths
        for one, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in places and places[parent][1] < depth:
                above, level = places[parent]
                places[one] = len(found), level + 1
                found.append((token, above, level + 1))
        return found


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
        """Return trees `[B, 1 + ask.nodes]`; a row without a draft gets a lone root."""
        rows = self._rows.rows[: len(context.tokens)]
        for _ in range(len(self._came)):
            came = self._came.popleft()
            for row in self._rows.rows:  # of a parked one, too
                if row.request is came[0]:
                    _, row.tokens, row.parents, row.at = came
        trees = [row.nodes(self.spec.max_depth) for row in rows]
        width = max(1, *map(len, trees))
        parts = np.zeros((3, len(rows), width), np.int64)
        log_probs = np.full((len(rows), width), -np.inf, np.float32)
        for place, (row, nodes) in enumerate(zip(rows, trees, strict=True)):
            row.tokens = row.parents = ()
            if nodes:
                parts[:, place, : len(nodes)] = np.array(nodes).T
                log_probs[place, : len(nodes)] = parts[2, place, : len(nodes)] * -_FADING
        device = context.tokens.device
        tokens, parents, depths, falling = (send(torch.from_numpy(part), device) for part in (*parts, log_probs))
        return from_nodes(context.pending, tokens, parents, depths, falling, ask.nodes + 1)


def _begin(text: Ids, request: Request | None) -> _Row:
    return _Row(request, [] if request is None else text[len(request.prompt_ids) :].tolist())
