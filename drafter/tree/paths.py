"""Draft trees on the host, as lists: following a text through one, and what is left of it behind the text.

A tree of N draft tokens has `tokens` `[N]` and the index of each one's parent, `parents` `[N]`, which comes before it;
`ROOT` for those that follow the text's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = -1


@dataclass(frozen=True)
class RowDrafts:
    """A row's draft tokens, with their depths and log-probabilities; see `from_nodes` for these."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, depth: int, log_prob: float) -> int:
        """Add a token behind those that are there, and return its index."""
        for values, value in zip(vars(self).values(), (token, parent, depth, log_prob), strict=True):
            values.append(value)
        return len(self.tokens) - 1


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node, in order; none of a node that is not there."""
    found = defaultdict[int, list[int]](list)
    for node, parent in enumerate(parents):
        found[parent].append(node)
    return found


def follow(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the nodes on the path that a text takes from the root, as far as it stays in the tree."""
    path, here = list[int](), ROOT
    for token in text:
        below = range(here + 1, len(parents))
        node = next((one for one in below if parents[one] == here and tokens[one] == token), None)
        if node is None:
            break
        here = node
        path.append(node)
    return path


def left_behind(
    tokens: Sequence[int], parents: Sequence[int], text: Sequence[int], depth: int | None = None
) -> list[tuple[int, int, int]]:
    """Return what is left of a tree once `text` has come, down to `depth` below its end; nothing if it is elsewhere.

    Returns:
        Each node that is left, the place of its parent among these (`ROOT` for the text's new end), and its depth.
    """
    path = follow(tokens, parents, text)
    if len(path) < len(text):
        return []
    found: list[tuple[int, int, int]] = []
    places = {path[-1] if path else ROOT: (ROOT, 0)}  # in what is left, and depths
    for node, parent in enumerate(parents):
        if parent in places and (depth is None or places[parent][1] < depth):
            above, level = places[parent]
            places[node] = len(found), level + 1
            found.append((node, above, level + 1))
    return found
