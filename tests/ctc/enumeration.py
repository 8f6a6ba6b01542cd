"""Every alignment, one by one: what the algorithms are checked against."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from drafter.token_tree import TokenTree

Prefix = tuple[int, ...]


def collapse(alignment: Prefix, blank: int) -> Prefix:
    """Remove repeats, then blanks."""
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank)


def text_probabilities(log_probs: Tensor) -> dict[Prefix, float]:
    """Probability of each collapsed text under CTC frames `[T, V + 1]`."""
    frames, symbols = log_probs.shape
    table = log_probs.double().tolist()
    texts: dict[Prefix, float] = defaultdict(float)
    for alignment in itertools.product(range(symbols), repeat=frames):
        probability = math.exp(sum(table[j][symbol] for j, symbol in enumerate(alignment)))
        texts[collapse(alignment, symbols - 1)] += probability
    return texts


def lattice_text_probabilities(
    frame: Callable[[int, Prefix], list[float]], frames: int, vocabulary: int, band: int
) -> dict[Prefix, float]:
    """Probability of each text in the lattice, kept within the band while it grows.

    `frame(j, text)` gives the log-probabilities of frame `j` (from 1) after `text`. A path that leaves the band
    (label `u` outside `u ≤ j < u + band`) may say nothing more: its mass stays with the text it has.
    """
    texts: dict[Prefix, float] = defaultdict(float)

    def walk(j: int, text: Prefix, log_probability: float) -> None:
        if j > frames or j >= len(text) + 1 + band:
            texts[text] += math.exp(log_probability)
            return
        probs = frame(j, text)
        walk(j + 1, text, log_probability + probs[vocabulary])
        for token in range(vocabulary):
            walk(j + 1, (*text, token), log_probability + probs[token])

    walk(1, (), 0.0)
    return texts


def prefix_probabilities(texts: dict[Prefix, float], depth: int) -> dict[Prefix, float]:
    """`π` of each non-empty prefix of up to `depth` tokens."""
    prefixes: dict[Prefix, float] = defaultdict(float)
    for text, probability in texts.items():
        for length in range(1, min(len(text), depth) + 1):
            prefixes[text[:length]] += probability
    return prefixes


def nodes(tree: TokenTree, row: int, depth: int) -> dict[Prefix, float]:
    """Prefix → price of a tree's real nodes below the root."""
    paths = tree.paths(depth)[row].tolist()
    prices = tree.log_prices[row].exp().tolist()
    return {
        tuple(token for token in path if token >= 0): price
        for path, price in zip(paths, prices, strict=True)
        if price > 0 and path[0] >= 0
    }


def check_slice_contract(tree: TokenTree) -> None:
    """Prices fall; a parent comes before its child, is one level up, and padding is last."""
    prices, parents, depths = tree.log_prices, tree.parents, tree.depths
    assert bool((prices[:, 1:] <= prices[:, :-1]).all())
    real = prices[:, 1:] > -torch.inf
    index = torch.arange(1, tree.size)
    assert bool((parents[:, 1:] < index)[real].all())
    assert bool((depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1)[real].all())
    assert bool((tree.tokens[:, 1:] >= 0)[real].all())
    assert bool((tree.tokens[:, 1:] == -1)[~real].all())
    assert bool((prices[:, 0] == 0).all())
