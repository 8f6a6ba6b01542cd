"""Probabilities by enumeration of all alignments, which the algorithms are checked against."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from tests.support.trees import Prefix


def collapse(alignment: Prefix, blank: int) -> Prefix:
    """Remove repeats, then blanks."""
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank)


def text_probabilities(log_probs: Tensor) -> dict[Prefix, float]:
    """Return the probability of each collapsed text under CTC frames `[T, V + 1]`."""
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
    """Return the probability of each text in the lattice within its band.

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
    """Return `π` of each non-empty prefix of up to `depth` tokens."""
    prefixes: dict[Prefix, float] = defaultdict(float)
    for text, probability in texts.items():
        for length in range(1, min(len(text), depth) + 1):
            prefixes[text[:length]] += probability
    return prefixes
