"""Shadow drafts: trees that are not verified but compared with the text that follows."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.budget.contract import ScoredTrees
from drafter.drafters.contract import Ask
from drafter.engine.sequence import Sequence
from drafter.tree.token_tree import TokenTree

Nodes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Shadow:
    """Trees `[B, 1 + k]` of B sequences, drafted when these had `lengths` output tokens."""

    member: int
    sequences: list[Sequence]
    lengths: list[int]
    tokens: Nodes
    parents: Nodes


class Shadows:
    """Shadow drafts whose text has not come yet."""

    def __init__(self) -> None:
        self._waiting: list[_Shadow] = []

    def add(self, sequences: list[Sequence], ask: Ask, tree: TokenTree) -> None:
        """Keep trees `[B, 1 + k]` of the present ends of B sequences."""
        lengths = [len(sequence.output) for sequence in sequences]
        tokens, parents = (part[:, : 1 + ask.nodes].cpu().numpy() for part in (tree.tokens, tree.parents))
        self._waiting.append(_Shadow(ask.member, sequences, lengths, tokens, parents))

    def scored(self) -> tuple[ScoredTrees, ...]:
        """Take the drafts of which the text shows by now what it contains."""
        found, waiting = [], []
        for shadow in self._waiting:
            trees = _score(shadow)
            if trees is None:
                waiting.append(shadow)
            else:
                found.append(trees)
        self._waiting = waiting
        return tuple(found)


def _score(shadow: _Shadow) -> ScoredTrees | None:
    """Compare a draft with its sequences' texts; return None while one of them may go on along its tree."""
    accepted = np.zeros((len(shadow.sequences), shadow.tokens.shape[1]), np.bool_)
    for row, (sequence, length) in enumerate(zip(shadow.sequences, shadow.lengths, strict=True)):
        path, may_go_on = follow(shadow.tokens[row], shadow.parents[row], sequence.output[length:])
        if may_go_on and not sequence.ended:
            return None
        accepted[row, path] = True
    return ScoredTrees(shadow.member, (shadow.tokens[:, 1:] >= 0).sum(1), accepted[:, 1:])


def follow(tokens: Nodes, parents: Nodes, text: Several[int]) -> tuple[list[int], bool]:
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
        below = np.flatnonzero((parents[1:] == node) & (tokens[1:] == token))
        if not len(below):
            return path, False
        node = 1 + int(below[0])
        path.append(node)
    return path, bool(((parents[1:] == node) & (tokens[1:] >= 0)).any())
