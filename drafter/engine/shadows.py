"""Shadow drafts: trees that are not verified but compared with the text that follows."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from drafter.budget.contract import ScoredTrees
from drafter.drafters.contract import Ask
from drafter.engine.sequence import Sequence
from drafter.tree.token_tree import PAD_TOKEN, TokenTree


@dataclass
class _Row:
    """A tree of 1 + k nodes at the end of a sequence that had `length` output tokens, and the text's path so far."""

    sequence: Sequence
    length: int
    tokens: list[int]
    parents: list[int]
    path: list[int] = field(default_factory=list)
    may_go_on: bool = True

    @property
    def settled(self) -> bool:
        if self.may_go_on:
            self.path, self.may_go_on = follow(self.tokens, self.parents, self.sequence.output[self.length :])
        return not self.may_go_on or self.sequence.ended


class Shadows:
    """Shadow drafts whose text has not come yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[_Row]]] = []  # the member that drafted, and its trees

    def add(self, sequences: list[Sequence], ask: Ask, tree: TokenTree, forced: Several[int]) -> None:
        """Keep trees of k draft tokens of the present ends of B sequences, without the `forced` ones at their start."""
        rows = []
        for sequence, begun, tokens, parents in zip(
            sequences, forced, tree.tokens.tolist(), tree.parents.tolist(), strict=True
        ):
            # The forced tokens are a chain, which the others follow.
            tokens = tokens[begun : begun + 1 + ask.nodes]
            missing = 1 + ask.nodes - len(tokens)
            parents = [max(parent - begun, 0) for parent in parents[begun : begun + 1 + ask.nodes]]
            row = [*tokens, *[PAD_TOKEN] * missing], [*parents, *[0] * missing]
            rows.append(_Row(sequence, len(sequence.output) + begun, *row))
        self._waiting.append((ask.member, rows))

    def scored(self) -> tuple[ScoredTrees, ...]:
        """Take the drafts of which the text shows by now what it contains."""
        found, waiting = [], []
        for member, rows in self._waiting:
            if all(row.settled for row in rows):
                found.append(_scored(member, rows))
            else:
                waiting.append((member, rows))
        self._waiting = waiting
        return tuple(found)


def _scored(member: int, rows: list[_Row]) -> ScoredTrees:
    accepted = np.zeros((len(rows), len(rows[0].tokens)), np.bool_)
    for place, row in enumerate(rows):
        accepted[place, row.path] = True
    drafted = np.array([sum(token >= 0 for token in row.tokens[1:]) for row in rows])
    return ScoredTrees(member, drafted, accepted[:, 1:])


def follow(tokens: Several[int], parents: Several[int], text: Several[int]) -> tuple[list[int], bool]:
    """Follow a text through a tree of N nodes.

    Args:
        tokens: `[N]` of the nodes, the root first; negative in padding.
        parents: `[N]` index of each node's parent.
        text: Tokens after the root's.

    Returns:
        The nodes on the text's path, and whether a longer text could have more.
    """
    path, node = list[int](), 0
    for token in text:
        below = (one for one in range(1, len(tokens)) if parents[one] == node and tokens[one] == token)
        if (found := next(below, None)) is None:
            return path, False
        node = found
        path.append(node)
    return path, any(parents[one] == node and tokens[one] >= 0 for one in range(1, len(tokens)))
