"""Shadow drafts: trees that are not verified but compared with the text that follows."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from drafter.budget.contract import ScoredTrees
from drafter.drafters.contract import Ask
from drafter.engine.sequence import Sequence
from drafter.tree.paths import ROOT, follow
from drafter.tree.token_tree import TokenTree


@dataclass
class _Row:
    """Draft tokens behind a sequence that had `length` output tokens, and the text's path through them so far."""

    sequence: Sequence
    length: int
    tokens: list[int]
    parents: list[int]
    path: list[int] = field(default_factory=list)
    may_go_on: bool = True

    @property
    def settled(self) -> bool:
        if self.may_go_on:
            text = self.sequence.output[self.length :]
            self.path = follow(self.tokens, self.parents, text)
            end = self.path[-1] if self.path else ROOT
            self.may_go_on = len(self.path) == len(text) and end in self.parents
        return not self.may_go_on or self.sequence.ended


class Shadows:
    """Shadow drafts whose text has not come yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Ask, list[_Row]]] = []  # what was asked for, and its trees

    def add(self, sequences: list[Sequence], ask: Ask, tree: TokenTree, forced: Several[int]) -> None:
        """Keep trees of k draft tokens of the present ends of B sequences, without the `forced` ones at their start."""
        rows = []
        for sequence, begun, tokens, parents in zip(
            sequences, forced, tree.tokens.tolist(), tree.parents.tolist(), strict=True
        ):
            # The forced tokens are a chain, which the others follow: its last one is their root.
            own = slice(begun + 1, min(begun + 1 + ask.nodes, sum(token >= 0 for token in tokens)))
            above = [max(parent - begun - 1, ROOT) for parent in parents[own]]
            rows.append(_Row(sequence, len(sequence.output) + begun, tokens[own], above))
        self._waiting.append((ask, rows))

    def scored(self) -> tuple[ScoredTrees, ...]:
        """Take the drafts of which the text shows by now what it contains."""
        found, waiting = [], []
        for ask, rows in self._waiting:
            if all(row.settled for row in rows):
                found.append(_scored(ask, rows))
            else:
                waiting.append((ask, rows))
        self._waiting = waiting
        return tuple(found)


def _scored(ask: Ask, rows: list[_Row]) -> ScoredTrees:
    accepted = np.zeros((len(rows), ask.nodes), np.bool_)
    for place, row in enumerate(rows):
        accepted[place, row.path] = True
    return ScoredTrees(ask.member, np.array([len(row.tokens) for row in rows]), accepted)
