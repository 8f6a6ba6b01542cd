"""Which texts come together in which step: a pure function of the seed.

Each epoch visits the parts in a new order. Within a part, each epoch groups texts of similar length into steps, so that
little is padded, and takes these steps in a new order. A resumed run begins with the part of its next step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_LENGTH_NOISE = 0.1
"""Relative noise on lengths, so that a step has other texts in every epoch."""


@dataclass(frozen=True)
class Visit:
    """Consecutive steps of a run that come from one part.

    Args:
        part: Index of the part.
        epoch: Number of the epoch, from 0.
        first_step: Number of the first step in the run, from 0.
        skip: Steps of the part, in this epoch, that come before the first.
        steps: Number of steps.
    """

    part: int
    epoch: int
    first_step: int
    skip: int
    steps: int


def visits(rows: Sequence[int], texts_per_step: int, seed: int, done: int, steps: int) -> Iterator[Visit]:
    """Yield the visits that make a run's steps `done … steps - 1`.

    Args:
        rows: Number of texts of each part; at least one part fills a step.
        texts_per_step: Texts of a step.
        seed: Seed of the order.
        done: Steps taken before.
        steps: Steps of the whole run.
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
    """Return the steps of a part in an epoch: indices of texts of similar length, shortest first.

    Args:
        lengths: Number of tokens of each text.
        texts_per_step: Texts of a step. Texts that are left over are not used in this epoch.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
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
    """Return the places in a step that a worker takes, for each micro-batch.

    A micro-batch takes consecutive places, so its texts are of similar length. Within it the workers take turns.

    Args:
        places: Texts of the step.
        micro_batches: Number of micro-batches.
        rank: The worker.
        workers: Number of workers.
    """
    bounds = [places * micro // micro_batches for micro in range(micro_batches + 1)]
    return [list(range(low + rank, high, workers)) for low, high in pairwise(bounds)]
