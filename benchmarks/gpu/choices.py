"""Milliseconds of one choice of a token for each row, by kind of sampling, by two kernels and by PyTorch's own."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from types import ModuleType

import torch

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from drafter import devices
from drafter.acceptance import choices
from drafter.acceptance.choices import NodeChoices, RowSampling, SamplingMode, SamplingTable
from drafter.requests import SamplingParams
from drafter.target_model.loading import pick_device
from drafter.tree.token_tree import root_only

KINDS = {
    "sampled": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.0, top_k=40),
    "top-p": SamplingParams(temperature=1.0, top_p=0.95),
    "top-k, top-p, min-p": SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(temperature=1.0, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1),
    "guided, greedy": SamplingParams(),
}
_TEXT = 512  # tokens of a row so far
_REPEATS = 10


def cells(plan: Plan) -> list[Key]:
    """Every kind of sampling at Llama-3's vocabulary."""
    size, batches = (1_000, [2]) if plan.tiny else (128_256, [16, 64, 1, 256])
    return [{"rows": rows, "vocabulary": size, "sampling": kind} for rows in batches for kind in KINDS]


def prepare(plan: Plan) -> Measure:
    """See `Stage`."""
    return lambda cell: measure(cell["sampling"], cell["rows"], cell["vocabulary"], pick_device())


@torch.inference_mode()
def measure(kind: str, rows: int, vocabulary: int, device: torch.device) -> Values:
    """Time the choice after the root of each row, and compare the tokens of both ways."""
    random = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, 1, vocabulary, generator=random, device=device).mul_(4).bfloat16()
    text = torch.randint(0, vocabulary, (rows, _TEXT), generator=random, device=device)
    table = SamplingTable.empty(rows, device)
    for slot in range(rows):
        table.set(slot, replace(KINDS[kind], seed=slot), 1)
    lengths = torch.full((rows,), _TEXT - 1, device=device)
    sampling = RowSampling(table, slice(0, rows), SamplingMode.of([KINDS[kind]]), text, lengths)
    allowed = None
    if kind.startswith("guided"):
        words = (rows, 1, -(-vocabulary // 32))
        allowed = torch.randint(-(2**31), 2**31 - 1, words, generator=random, device=device, dtype=torch.int32)
    tree = root_only(text[:, -1])
    asked = NodeChoices(logits, tree, tree.ancestors(), sampling, allowed)
    ids, nodes = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.long, device=device)

    def timed(kernels: ModuleType | None) -> tuple[torch.Tensor, float]:
        asked.kernels = kernels
        asked.at(ids, nodes)  # kernels are compiled
        found = [devices.timed(device, lambda: asked.at(ids, nodes)) for _ in range(_REPEATS)]
        return found[-1][0], 1000 * median(seconds for _, seconds in found)

    expected, by_torch = timed(None)
    kernels = choices.gpu_kernels(device)
    if kernels is None:
        return {"PyTorch ms": by_torch, "kernels ms": None, "differing": None}
    found, by_kernels = timed(kernels)
    return {"PyTorch ms": by_torch, "kernels ms": by_kernels, "differing": int((found != expected).sum())}


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {**cell, **{name: "-" if value is None else round(value, 3) for name, value in values.items()}}


STAGE = Stage("choices", "One choice of a token a row, by kernels and by PyTorch.", cells, prepare, row)
