"""Feeds training steps: assigns texts to steps and workers, and stores hidden states that are cheaper to read.

Each epoch visits the parts in a new order. Texts of similar length make a step, which saves padding. The order follows
from the seed, so a resumed run begins with the part of its next step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from drafter.errors import RequestError
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.images.processor import ImageProcessor
from drafter.target_model.model import BaseModel
from drafter.training.reading import hidden_states, needs_sight, with_hidden_states
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, anchor_draws, draft_batch
from pipeline.errors import InputError
from pipeline.io.files import Location, parquet_rows
from pipeline.io.parts import Part
from pipeline.training.config import TrainConfig
from pipeline.training.texts import StagedTexts, read_part, text_of

_LENGTH_NOISE = 0.1  # relative noise on lengths, so that each epoch groups the texts differently
_POLL_SECONDS = 1.0
_CPU = torch.device("cpu")


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


class BatchFeed:
    """Makes a worker's batches from its texts, for a head of some `depth`; `tokens` counts those of all workers."""

    def __init__(
        self,
        staged: StagedTexts,
        config: TrainConfig,
        reader: TextReader,
        depth: int,
        device: torch.device,
        rank: int,
        workers: int,
    ) -> None:
        self._staged, self._config, self._settings, self._reader = staged, config, config.training, reader
        self._depth, self._device, self._rank, self._workers = depth, device, rank, workers
        self.tokens = 0

    def batches(self, done: int) -> Iterator[list[DraftBatch]]:
        """Yield the micro-batches of each step, from step `done` (from 0) to the run's last."""
        rows, settings = [part.rows for part in self._staged.parts], self._settings
        plan = list(visits(rows, settings.texts_per_step, settings.seed, done, settings.steps))
        if not plan:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="texts") as reader:
            ahead = reader.submit(self._read, plan[0])
            for visit, following in zip_longest(plan, plan[1:]):
                table = ahead.result()
                if following is not None:
                    ahead = reader.submit(self._read, following)
                yield from self._steps(visit, table)

    def _read(self, visit: Visit) -> pa.Table:
        part = self._staged.parts[visit.part]
        table = read_part(self._staged.folder, part.name)
        if not self._config.texts.store_hidden:
            return table
        file = _hidden_file(self._staged, part)
        stored = pa.parquet.read_table(file.path, filesystem=file.filesystem)
        return table.append_column("hidden", stored["hidden"])

    def _steps(self, visit: Visit, table: pa.Table) -> Iterator[list[DraftBatch]]:
        settings, micro_batches = self._settings, self._config.sharding.micro_batches
        lengths = table["tokens"].combine_chunks().value_lengths().to_pylist()
        steps = steps_of(lengths, settings.texts_per_step, settings.seed, visit.epoch, visit.part)
        for number, step in enumerate(steps[visit.skip : visit.skip + visit.steps], start=visit.first_step):
            self.tokens += sum(lengths[text] for text in step)
            shares = share(len(step), micro_batches, self._rank, self._workers)
            yield [self._batch([self._text(table, step[place]) for place in mine], number, mine) for mine in shares]

    def _batch(self, texts: list[RegeneratedText], step: int, places: list[int]) -> DraftBatch:
        draws = anchor_draws(self._settings.seed, step, places)
        if not self._config.texts.store_hidden:
            texts = self._reader.completed(texts)
        return draft_batch(texts, self._depth, self._settings.anchors_per_text, draws).to(self._device)

    def _text(self, table: pa.Table, row: int) -> RegeneratedText:
        if "hidden" not in table.column_names:
            return text_of(table.slice(row, 1).to_pylist()[0], self._reader.processor)
        tokens, stored = table["tokens"][row].as_py(), bytearray(table["hidden"][row].as_py())
        hidden = torch.frombuffer(stored, dtype=_dtype(self._settings)).view(len(tokens), -1)
        return RegeneratedText(tokens, table["prompt_length"][row].as_py(), hidden)


class TextReader:
    """Reads texts for a worker, those with images by the target model's own `processor`.

    Args:
        layers: Those of `training_layers`.
    """

    def __init__(
        self, base: BaseModel, processor: ImageProcessor | None, settings: TrainingSettings, layers: tuple[int, ...]
    ) -> None:
        self.base, self.processor, self.layers, self._settings = base, processor, layers, settings

    def held_out(self, staged: StagedTexts, head: DraftHead) -> list[RegeneratedText]:
        """Return the texts for β of a head.

        Raises `InputError` if the target model cannot read a text's images, or the head cannot be measured on any text.
        """
        texts = staged.held_out(self.processor)
        if head.reads_texts:
            texts = [text for text in texts if not needs_sight(self.base, text)]
            if not texts:
                raise InputError(
                    f"β of a head of {head.algorithm} is measured on texts without images, and all that are held out "
                    "have some: distil prompts without images, too, and name them as texts.held_out"
                )
        return self.completed(texts, _CPU)

    def completed(self, texts: Sequence[RegeneratedText], device: torch.device | None = None) -> list[RegeneratedText]:
        """Return texts with hidden states if the training step cannot compute them from token ids alone.

        They go to `device`, by default the target model's.

        Raises:
            InputError: The target model cannot read a text's images.
        """
        with self._reading():
            return with_hidden_states(self.base, texts, self.layers, _dtype(self._settings), device)

    def states(self, texts: Sequence[RegeneratedText]) -> list[Tensor]:
        """Return hidden states `[len(text), K · d]` of each text, on the CPU, as a training step would have them.

        Raises as `completed`.
        """
        with self._reading():
            return hidden_states(self.base, texts, self.layers, _dtype(self._settings), _CPU)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        bf16 = self._settings.precision == "bf16"
        try:
            with torch.autocast(self.base.device.type, torch.bfloat16, enabled=bf16):
                yield
        except RequestError as error:
            raise InputError(f"input has a text whose images cannot be read: {error}") from error


# Stored hidden states. They are many times larger than the texts, so they are stored only on request.


def store_hidden(
    reader: TextReader,
    staged: StagedTexts,
    settings: TrainingSettings,
    rank: int,
    workers: int,
    show: Callable[[str], object],
) -> None:
    """Compute this worker's share of the missing or damaged parts, and wait until all parts are there.

    The target model of `reader` is not partitioned.
    """
    missing = [part for part in staged.parts if not _is_stored(staged, part)]
    if rank == 0 and missing:
        width, itemsize = reader.base.hidden_size * len(reader.layers), _dtype(settings).itemsize
        tokens = staged.counts.tokens
        size = f"{tokens:,} × {width:,} × {itemsize} bytes = {tokens * width * itemsize / 2**30:,.2f} GiB"
        show(f"hidden states of {tokens:,} tokens: {size}")
    for part in staged.parts[rank::workers]:
        if part not in missing:
            continue
        texts = [text_of(row, reader.processor) for row in read_part(staged.folder, part.name).to_pylist()]
        rows = [_bytes(states) for states in reader.states(texts)]
        table = pa.table({"hidden": pa.array(rows, pa.large_binary())})
        with _hidden_file(staged, part).open_whole() as stream:
            pa.parquet.write_table(table, stream, compression="none")
    # A barrier of the process group would time out long before a large store is complete.
    while missing := [part for part in missing if not _is_stored(staged, part)]:
        time.sleep(_POLL_SECONDS)


def _bytes(states: Tensor) -> bytes:
    return states.contiguous().view(torch.uint8).numpy().tobytes()


def _dtype(settings: TrainingSettings) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def _is_stored(staged: StagedTexts, part: Part) -> bool:
    return parquet_rows(_hidden_file(staged, part)) == part.rows


def _hidden_file(staged: StagedTexts, part: Part) -> Location:
    return staged.folder / f"{part.name}.hidden.parquet"
