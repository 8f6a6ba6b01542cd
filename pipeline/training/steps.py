"""Assigns texts to training steps, as a pure function of the seed.

Each epoch visits the parts in a new order. Within a part, it groups texts of similar length into steps, which saves
padding, and shuffles these steps. A resumed run begins with the part of its next step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import pyarrow as pa

from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText
from pipeline.training.hidden_store import as_states, read_hidden
from pipeline.training.texts import StagedTexts, read_part

_LENGTH_NOISE = 0.1
"""Relative noise on lengths, so that each epoch groups the texts differently."""


@dataclass(frozen=True)
class Visit:
    """Consecutive steps from one part; `skip` counts its steps in this epoch before them. Numbers begin at 0."""

    part: int
    epoch: int
    first_step: int
    skip: int
    steps: int


def visits(rows: Sequence[int], texts_per_step: int, seed: int, done: int, steps: int) -> Iterator[Visit]:
    """Yield the visits of a run's steps `done … steps - 1`. At least one part, of `rows` texts, fills a step."""
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

    Texts that do not fill a step are not used in this epoch.
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
    """Return a worker's places in a step of `places` texts, for each micro-batch.

    A micro-batch takes consecutive places, so its texts are of similar length. Within it the workers take turns.
    """
    bounds = [places * micro // micro_batches for micro in range(micro_batches + 1)]
    return [list(range(low + rank, high, workers)) for low, high in pairwise(bounds)]


# Reading the texts.


@dataclass(frozen=True)
class Share:
    """A worker's share of each step; `hidden` if the texts come with their stored hidden states."""

    rank: int
    workers: int
    micro_batches: int
    hidden: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """A worker's texts of one micro-batch, at least one, and their places in the whole step."""

    texts: list[RegeneratedText]
    places: list[int]


@dataclass(frozen=True)
class StepTexts:
    """A worker's texts of one step (from 0); `tokens` counts those of all workers' texts."""

    step: int
    tokens: int
    micro_batches: list[MicroBatch]


def stream_steps(staged: StagedTexts, settings: TrainingSettings, mine: Share, done: int) -> Iterator[StepTexts]:
    """Yield a worker's texts of each step, from step `done` (from 0) to the run's last."""
    plan = list(
        visits([part.rows for part in staged.parts], settings.texts_per_step, settings.seed, done, settings.steps)
    )
    if not plan:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="texts") as reader:
        ahead = reader.submit(_read, staged, plan[0], mine)
        for visit, following in zip_longest(plan, plan[1:]):
            table = ahead.result()
            if following is not None:
                ahead = reader.submit(_read, staged, following, mine)
            yield from _steps(visit, table, settings, mine)


def _read(staged: StagedTexts, visit: Visit, mine: Share) -> pa.Table:
    part = staged.parts[visit.part]
    table = read_part(staged.folder, part.name)
    return table.append_column("hidden", read_hidden(staged, part)) if mine.hidden else table


def _steps(visit: Visit, table: pa.Table, settings: TrainingSettings, mine: Share) -> Iterator[StepTexts]:
    lengths = table["tokens"].combine_chunks().value_lengths().to_pylist()
    steps = steps_of(lengths, settings.texts_per_step, settings.seed, visit.epoch, visit.part)
    for number, step in enumerate(steps[visit.skip : visit.skip + visit.steps], start=visit.first_step):
        shares = share(len(step), mine.micro_batches, mine.rank, mine.workers)
        batches = [MicroBatch([_text(table, step[place], settings) for place in places], places) for places in shares]
        yield StepTexts(number, sum(lengths[text] for text in step), batches)


def _text(table: pa.Table, row: int, settings: TrainingSettings) -> RegeneratedText:
    tokens = table["tokens"][row].as_py()
    hidden = as_states(table["hidden"][row].as_py(), len(tokens), settings) if "hidden" in table.column_names else None
    return RegeneratedText(tokens, table["prompt_length"][row].as_py(), hidden)
