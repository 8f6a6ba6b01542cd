"""The texts of each step, read by the worker that learns from them.

Every worker reads the same parts in the same order and takes its own share of each step. A thread reads the next part
while the worker learns from this one. Ray Data is not used here: while its consumer is busy, its scheduler spins in the
consumer's own process (Ray 2.60), which took most of a core from the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import pyarrow as pa

from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText
from pipeline.training.texts.hidden_store import as_states, read_hidden
from pipeline.training.texts.staged_texts import StagedTexts, read_part
from pipeline.training.texts.step_schedule import Visit, share, steps_of, visits


@dataclass(frozen=True)
class Share:
    """A worker's share of each step.

    Args:
        rank: Rank of the worker.
        workers: Number of workers.
        micro_batches: Number of micro-batches of a step.
        hidden: Whether the texts come with their stored hidden states.
    """

    rank: int
    workers: int
    micro_batches: int
    hidden: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """A worker's texts of one micro-batch.

    Args:
        texts: At least one text.
        places: Place of each text in the whole step.
    """

    texts: list[RegeneratedText]
    places: list[int]


@dataclass(frozen=True)
class StepTexts:
    """A worker's texts of one step.

    Args:
        step: Number of the step in the run, from 0.
        tokens: Number of tokens of all workers' texts.
        micro_batches: The micro-batches in order.
    """

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
    """Return the texts of a visit's part, with their hidden states where they are stored."""
    part = staged.parts[visit.part]
    table = read_part(staged.folder, part.name)
    return table.append_column("hidden", read_hidden(staged, part)) if mine.hidden else table


def _steps(visit: Visit, table: pa.Table, settings: TrainingSettings, mine: Share) -> Iterator[StepTexts]:
    """Yield a worker's texts of the steps of one visit, in order."""
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
