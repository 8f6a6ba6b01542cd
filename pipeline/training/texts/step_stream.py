"""The texts of each step, streamed to a worker by Ray Data.

Every worker streams the same parts in the same order and receives its own share of each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import ray

from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText
from pipeline.cluster.ray_cluster import quiet_ray_data
from pipeline.cluster.shares import HELPER_CPUS
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
    quiet_ray_data()
    rows = [part.rows for part in staged.parts]
    plan = list(visits(rows, settings.texts_per_step, settings.seed, done, settings.steps))
    if not plan:
        return
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.from_items([asdict(visit) for visit in plan], override_num_blocks=len(plan)).map_batches(
        read_visit,
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=HELPER_CPUS,
        fn_kwargs={"staged": staged, "settings": settings, "mine": mine},
    )
    for step, texts in groupby(dataset.iter_rows(), key=itemgetter("step")):
        yield _step_texts(step, list(texts), settings)


def read_visit(table: pa.Table, staged: StagedTexts, settings: TrainingSettings, mine: Share) -> pa.Table:
    """Return a worker's share of one visit, a row for each text, in order. Runs anywhere on the cluster."""
    (values,) = table.to_pylist()
    visit = Visit(**values)
    texts = read_part(staged.folder, staged.parts[visit.part].name)
    lengths = [len(tokens) for tokens in texts["tokens"]]
    steps = steps_of(lengths, settings.texts_per_step, settings.seed, visit.epoch, visit.part)
    if mine.hidden:
        texts = texts.append_column("hidden", read_hidden(staged, staged.parts[visit.part]))
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(steps[visit.skip : visit.skip + visit.steps], start=visit.first_step):
        tokens = sum(lengths[text] for text in step)
        for micro, places in enumerate(share(len(step), mine.micro_batches, mine.rank, mine.workers)):
            for place in places:
                text = {name: texts[name][step[place]].as_py() for name in texts.column_names}
                rows.append({"step": number, "step_tokens": tokens, "micro": micro, "place": place, **text})
    return pa.Table.from_pylist(rows)


def _step_texts(step: int, rows: list[dict[str, Any]], settings: TrainingSettings) -> StepTexts:
    parts = []
    for _, some in groupby(rows, key=itemgetter("micro")):
        mine = list(some)
        texts = [_text(row, settings) for row in mine]
        parts.append(MicroBatch(texts, [row["place"] for row in mine]))
    return StepTexts(step, rows[0]["step_tokens"], parts)


def _text(row: dict[str, Any], settings: TrainingSettings) -> RegeneratedText:
    stored = row.get("hidden")
    hidden = as_states(stored, len(row["tokens"]), settings) if stored is not None else None
    return RegeneratedText(row["tokens"], row["prompt_length"], hidden)
