"""Stores the target model's hidden states of all texts where reading them is cheaper than a forward.

They are many times larger than the texts, so they are stored only on request, after their size has been shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafter.target.model import BaseModel
from drafter.training.settings import TrainingSettings
from drafter.training.targets import base_hidden_states
from pipeline.io.files import Location, parquet_rows
from pipeline.io.parts import Part
from pipeline.training.texts import StagedTexts, read_part

_TEXTS_AT_ONCE = 8
_POLL_SECONDS = 1.0


def store_hidden(
    base: BaseModel,
    staged: StagedTexts,
    settings: TrainingSettings,
    layers: tuple[int, ...],
    rank: int,
    workers: int,
    show: Callable[[str], None],
) -> None:
    """Compute this worker's share of the missing or damaged parts, and wait until all parts are there.

    Args:
        base: The target model, not partitioned.
        layers: Layers of the hidden states; see `training_layers`.
    """
    missing = [part for part in staged.parts if not _is_stored(staged, part)]
    if rank == 0 and missing:
        show(size_line(staged.counts.tokens, base.hidden_size * len(layers), _dtype(settings).itemsize))
    for part in staged.parts[rank::workers]:
        if part not in missing:
            continue
        texts = read_part(staged.folder, part.name)["tokens"].to_pylist()
        rows = [_bytes(states) for states in _states(base, texts, settings, layers)]
        table = pa.table({"hidden": pa.array(rows, pa.large_binary())})
        with _file(staged, part).open_whole() as stream:
            pa.parquet.write_table(table, stream, compression="none")
    # A barrier of the process group would time out long before a large store is complete.
    while missing := [part for part in missing if not _is_stored(staged, part)]:
        time.sleep(_POLL_SECONDS)


def read_hidden(staged: StagedTexts, part: Part) -> pa.ChunkedArray:
    """Return the stored states of a part's texts, in their order; see `as_states`."""
    file = _file(staged, part)
    return pa.parquet.read_table(file.path, filesystem=file.filesystem)["hidden"]


def as_states(stored: bytes, length: int, settings: TrainingSettings) -> Tensor:
    """Return one text's hidden states `[length, K · d]`."""
    return torch.frombuffer(bytearray(stored), dtype=_dtype(settings)).view(length, -1)


def size_line(tokens: int, width: int, itemsize: int) -> str:
    """Return a line that says how large a store will be."""
    size = tokens * width * itemsize
    return f"hidden states of {tokens:,} tokens: {tokens:,} × {width:,} × {itemsize} bytes = {size / 2**30:,.2f} GiB"


def _states(
    base: BaseModel, texts: Sequence[Sequence[int]], settings: TrainingSettings, layers: tuple[int, ...]
) -> list[Tensor]:
    """Hidden states `[len(text), K · d]` of each text, as the training step would compute them."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for first in range(0, len(order), _TEXTS_AT_ONCE):
        group = order[first : first + _TEXTS_AT_ONCE]
        tokens = pad_sequence([torch.tensor(texts[index]) for index in group], batch_first=True).to(base.device)
        with torch.autocast(base.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            hidden = base_hidden_states(base, tokens, layers)
        for index, states in zip(group, hidden, strict=True):
            found[index] = states[: len(texts[index])].to("cpu", _dtype(settings))
    return [found[index] for index in range(len(texts))]


def _bytes(states: Tensor) -> bytes:
    return states.contiguous().view(torch.uint8).numpy().tobytes()


def _dtype(settings: TrainingSettings) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def _is_stored(staged: StagedTexts, part: Part) -> bool:
    return parquet_rows(_file(staged, part)) == part.rows


def _file(staged: StagedTexts, part: Part) -> Location:
    return staged.folder / f"{part.name}.hidden.parquet"
