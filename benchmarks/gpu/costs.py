"""Cost curves: drafting and verifying over nodes, rows and context, of random weights in the shapes of real models."""

from __future__ import annotations

from dataclasses import asdict

import torch

from benchmarks import costs
from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from benchmarks.gpu.formulae import NO_DRAFT, step_bytes
from drafter.drafters.contract import Drafter, Loan
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from recipes.paper.base_sizes import BaseSizes

_CURVES: tuple[tuple[str, tuple[int, ...], dict[str, int]], ...] = (
    ("rows", (1, 16, 64), {"nodes": 0, "context": 512}),
    ("rows", (1, 16, 64), {"nodes": 16, "context": 512}),
    ("nodes", (4, 8, 32, 63), {"rows": 1, "context": 512}),
    ("nodes", (4, 63), {"rows": 16, "context": 512}),
    ("nodes", (4,), {"rows": 64, "context": 512}),
    ("rows", (256,), {"nodes": 0, "context": 512}),
    ("rows", (4, 128), {"nodes": 0, "context": 512}),
    ("context", (512, 2048, 8192), {"nodes": 0, "rows": 1}),
    ("context", (512, 2048, 8192), {"nodes": 16, "rows": 1}),
    ("context", (2048, 8192), {"nodes": 0, "rows": 8}),
)
"""What grows, over which values, and what is held; the most telling ones first."""
_TINY: tuple[tuple[str, tuple[int, ...], dict[str, int]], ...] = (
    ("nodes", (0, 4), {"rows": 1, "context": 64}),
    ("rows", (1, 2), {"nodes": 4, "context": 64}),
)


def cells(plan: Plan) -> list[Key]:
    """The curves' points, each once."""
    curves, shapes = (_TINY, ["tiny"]) if plan.tiny else (_CURVES, ["llama-8b", "llama-1b"])
    points = [held | {name: value} for name, values, held in curves for value in values]
    ordered = [{name: point[name] for name in ("rows", "nodes", "context")} for point in points]
    return [
        {"shape": shape, **dict(point)}
        for shape in shapes
        for point in dict.fromkeys(tuple(one.items()) for one in ordered)
    ]


def prepare(plan: Plan) -> Measure:
    """See `Stage`. One base is in the memory at a time."""
    held: dict[str, tuple[BaseModel, Drafter, costs.Machine]] = {}

    def measure(cell: Key) -> Values:
        shape, nodes, rows, context = cell["shape"], cell["nodes"], cell["rows"], cell["context"]
        if shape not in held:
            held.clear()
            base, drafter = costs.of_shape(shape, "auto")
            base.allow_packing()  # as an engine does: it decides what attention reads
            held[shape] = base, drafter, costs.measure_machine(base)
        base, drafter, machine = held[shape]
        cache = base.new_cache(rows, context + max(nodes + 8, drafter.spec.positions))
        drafter.open(Loan(base, rows, context + nodes + drafter.spec.max_depth + 2, StageTimes(), cache))
        draft, verify = costs.measure(base, drafter, cache, nodes, rows, context)
        sizes = BaseSizes.of(base.config, base.dtype)
        read = step_bytes(sizes, rows, nodes + 1, context + nodes + 1, drafter.spec.max_depth, NO_DRAFT)
        return {
            "draft": draft,
            "verify": verify,
            "least": machine.least_seconds(base, nodes, rows, context),
            "bytes": asdict(read),
            "machine": asdict(machine),
            "peak_bytes": torch.cuda.max_memory_allocated() if base.device.type == "cuda" else None,
        }

    return measure


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    read = sum(values["bytes"].values())
    return {
        **cell,
        "draft ms": f"{1e3 * values['draft']:.2f}",
        "verify ms": f"{1e3 * values['verify']:.2f}",
        "roofline ÷ verify": f"{values['least'] / values['verify']:.2f}",
        "formula GB": f"{read / 1e9:.3f}",
        "bytes ÷ bandwidth ms": f"{1e3 * read / values['machine']['bytes_per_second']:.2f}",
    }


STAGE = Stage(
    "costs",
    "Times of drafting and verifying, random weights, on a GPU as CUDA graphs.",
    cells,
    prepare,
    row,
    first=lambda cell: cell["shape"] != "llama-1b" and cell["context"] == 512 and cell["rows"] in (1, 16, 64),
)
