"""Which texts meet in which step: a pure function of the seed.

An epoch visits the parts in an order of its own. Within a part, an epoch puts texts of like length together, so that
little is padded, and takes the steps in an order of its own. A run that goes on begins at the part of its step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_LENGTH_NOISE = 0.1
"""Relative; keeps the same texts from meeting in every epoch."""


@dataclass(frozen=True)
class Visit:
    """Some consecutive steps of a run, all from one part.

    Args:
        part: Index of the part.
        epoch: Counts from 0.
        first_step: The run's step that the first of them is, from 0.
        skip: Steps of the part, in this epoch, that come before them.
        steps: How many they are.
    """

    part: int
    epoch: int
    first_step: int
    skip: int
    steps: int


def visits(rows: Sequence[int], texts_per_step: int, seed: int, done: int, steps: int) -> Iterator[Visit]:
    """The visits of a run's steps `done … steps - 1`.

    Args:
        rows: Texts of each part; at least one part fills a step.
        texts_per_step: Texts of a step.
        seed: Of the order.
        done: Steps taken before.
        steps: All steps of the run.
    """
    whole = [count // texts_per_step for count in rows]
    epoch, left = divmod(done, sum(whole))
    while done < steps:
        order = list(range(len(rows)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for part in order:
            skip = min(left, whole[part])
            left -= skip
            if count := min(whole[part] - skip, steps - done):
                yield Visit(part, epoch, done, skip, count)
                done += count
        epoch += 1


def steps_of(lengths: Sequence[int], texts_per_step: int, seed: int, epoch: int, part: int) -> list[list[int]]:
    """The steps of a part in an epoch: indices of `texts_per_step` texts each, of like length, shortest first.

    Args:
        lengths: Tokens of each text.
        texts_per_step: Texts of a step; those that fill no step stay out of this epoch.
        seed: Of the order.
        epoch: Counts from 0.
        part: Index of the part.
    """
    rng = random.Random(f"{seed}/{epoch}/{part}")
    texts = rng.sample(range(len(lengths)), len(lengths) // texts_per_step * texts_per_step)
    noisy = {text: lengths[text] * rng.uniform(1 - _LENGTH_NOISE, 1 + _LENGTH_NOISE) for text in texts}
    texts.sort(key=noisy.__getitem__)
    steps = [
        sorted(texts[first : first + texts_per_step], key=lambda text: (lengths[text], text))
        for first in range(0, len(texts), texts_per_step)
    ]
    rng.shuffle(steps)
    return steps


def share(places: int, micro_batches: int, rank: int, workers: int) -> list[list[int]]:
    """The places in a step that a worker takes, for each micro-batch.

    Micro-batches are neighbours in length; within one, workers take turns.
    """
    bounds = [places * micro // micro_batches for micro in range(micro_batches + 1)]
    return [list(range(low + rank, high, workers)) for low, high in pairwise(bounds)]
