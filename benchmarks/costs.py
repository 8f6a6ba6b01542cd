"""Time of drafting and verification as nodes, rows and context grow, beside the roofline of this machine.

    python -m benchmarks.costs --output benchmarks/results/costs
    python -m benchmarks.costs --shape llama-7b --compile --output benchmarks/results/costs-7b

Draft nodes, rows and context grow one at a time; the other two are held. On a GPU the work is timed as CUDA graphs.
`--shape` uses random weights, which take the same time as trained ones. The roofline is the least time of a forward:
the bytes that it must read and the operations that it must do, at the rates that two measurements on this machine give.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafter.devices import is_asynchronous, synchronise
from drafter.drafters.contract import Ask, DraftContext, Drafter, Loan
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.queued_step import padded_length
from drafter.errors import LoadError
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import new_head
from drafter.statistics import StageTimes
from drafter.target_model.cache import TargetCache
from drafter.target_model.loading import load_base, pick_device, pick_dtype
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.target_model.prepacked import halved_weights
from drafter.tree.token_tree import root_only

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS_FILE = "costs.json"
TABLE_FILE = "costs.md"
PLOT_FILE = "costs.png"
NODES, ROWS, CONTEXTS = (0, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512, 896)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-7b": ({}, {"num_heads": 32, "intermediate_size": 11008}),
    "llama-1b": (
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
        },
        {"num_heads": 32, "intermediate_size": 8192},
    ),
    "llama-8b": (
        {
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
        },
        {"num_heads": 32, "intermediate_size": 14_336},
    ),
    "tiny": (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        {"num_heads": 4, "intermediate_size": 128},
    ),
}
"""Settings of `LlamaConfig` for bases of random weights, and of CTC heads for them."""
_HELD = {"nodes": 16, "rows": 4, "context": 256}
_PLAIN = {"nodes": 0, "rows": 1, "context": 256}
_WARM_UP, _TURNS = 3, 15
_MOST_READ = 1 << 30
"""Largest number of weights that are read to measure the rate of reading: more than any cache holds."""


@dataclass(frozen=True)
class Point:
    """Times of one step.

    Args:
        nodes: Number of draft nodes of each row.
        rows: Number of rows decoded together.
        context: Number of committed positions of each row.
        draft: Seconds of drafting.
        verify: Seconds of the base's forward.
        least: Seconds of the forward by the roofline.
    """

    nodes: int
    rows: int
    context: int
    draft: float
    verify: float
    least: float


@dataclass(frozen=True)
class Machine:
    """Highest rates of this machine.

    Args:
        bytes_per_second: Rate of reading, measured by a product of a matrix and a vector.
        operations_per_second: Rate of arithmetic, measured by a product of large matrices. A multiplication and an
            addition are two operations.
    """

    bytes_per_second: float
    operations_per_second: float

    def least_seconds(self, base: BaseModel, nodes: int, rows: int, context: int) -> float:
        """Return the least seconds of a forward.

        It reads all weights and the rows' keys and values once, and does two operations for each weight and token.
        """
        config = base.config
        weights = weights_of(base)
        cached = rows * (context + nodes + 1) * base.new_cache(1, 1).nbytes
        heads = int(config.num_attention_heads)
        queries = (nodes + 1) * heads // int(getattr(config, "num_key_value_heads", None) or heads)
        operations = 2 * weights * rows * (nodes + 1) + 2 * queries * cached // base.dtype.itemsize
        read = weights * base.dtype.itemsize - 2 * halved_weights(base.model) + cached
        return max(read / self.bytes_per_second, operations / self.operations_per_second)


def weights_of(base: BaseModel) -> int:
    """Return the number of weights that a forward reads.

    The embedding, of which a forward reads little, is counted instead of the LM head, which has the same size.
    """
    return sum(parameter.numel() for parameter in base.decoder.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record, its table and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help=f"folder for {COSTS_FILE}, {TABLE_FILE}, {PLOT_FILE}"
    )
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="ctc")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in place of --model, --drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="compile the base's forward")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    try:
        if args.shape is None:
            base = load_base(args.model, dtype=args.dtype)
            drafter = load_drafter(args.drafter, base, max(NODES))
        else:
            base, drafter = of_shape(args.shape, args.dtype)
    except LoadError as error:
        raise SystemExit(f"error: {error}") from error
    base.allow_packing()  # as an engine does: it decides what attention reads
    if args.compile:
        base.compile()
    contexts = [one for one in CONTEXTS if base.max_positions is None or one + max(NODES) < base.max_positions]
    cache = base.new_cache(max(ROWS), max(contexts) + max(max(NODES) + 1, drafter.spec.positions))
    length = max(contexts) + max(NODES) + drafter.spec.max_depth + 2
    drafter.open(Loan(base, max(ROWS), length, StageTimes(), cache))
    best = measure_machine(base)
    settings = [start | {"nodes": nodes} for start in (_PLAIN, _HELD) for nodes in NODES]
    for name, values in (("rows", ROWS), ("context", contexts)):
        settings += [_HELD | {name: value, "nodes": nodes} for value in values for nodes in (0, _HELD["nodes"])]
    points = []
    for setting in [dict(one) for one in dict.fromkeys(tuple(one.items()) for one in settings)]:
        draft, verify = measure(base, drafter, cache, **setting)
        points.append(Point(**setting, draft=draft, verify=verify, least=best.least_seconds(base, **setting)))
        print(points[-1], file=sys.stderr)
    record = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.costs", *given])),
        "compiled": args.compile,
        "machine": asdict(best),
        "cache": {"slots": cache.slots, "length": cache.length, "bytes": cache.nbytes},
        "points": [asdict(point) for point in points],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / COSTS_FILE, record)
    print(write_report(args.output))


def of_shape(name: str, dtype: str) -> tuple[BaseModel, Drafter]:
    """Return a base of random weights on the first GPU, or the CPU, and a drafter with an untrained CTC head."""
    device = pick_device()
    settings, head = SHAPES[name]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=pick_dtype(dtype, device))
    base = BaseModel(model, name)
    trained = new_head("ctc", base, head).to(base.dtype).eval().requires_grad_(False)
    return base, trained.drafter(base, max(NODES))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of `work` after a few warm-up turns. On a GPU it is recorded as a CUDA graph."""
    seconds = []
    if device.type == "cuda":
        for _ in range(_WARM_UP):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    for turn in range(_WARM_UP + _TURNS):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        if turn >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure_machine(base: BaseModel) -> Machine:
    """Measure the rates of the base's device in the base's dtype."""
    large = 1 << (13 if base.device.type == "cuda" else 11)
    # As many numbers as the base has weights, because a small model stays in a processor's caches.
    rows = max(1, min(weights_of(base), _MOST_READ) // large)
    kind: Any = {"dtype": base.dtype, "device": base.device}
    tall, vector, square = (
        torch.randn(rows, large, **kind),
        torch.randn(large, 1, **kind),
        torch.randn(large, large, **kind),
    )
    reading = timed(lambda: tall @ vector, base.device)
    doing = timed(lambda: square @ square, base.device)
    return Machine(tall.nbytes / reading, 2 * large**3 / doing)


@torch.inference_mode()
def measure(
    base: BaseModel, drafter: Drafter, cache: TargetCache, nodes: int, rows: int, context: int
) -> tuple[float, float]:
    """Return the seconds of drafting and of verifying trees of `nodes` draft nodes, on random text."""
    kind: Any = {"device": base.device, "generator": torch.Generator(base.device).manual_seed(0)}
    tokens = torch.randint(0, base.vocab_size, (rows, context + 1), **kind)
    lengths = torch.full((rows,), context, device=base.device)
    hidden = torch.stack([base.prefill(cache, row, [tokens[row, :context]]) for row in range(rows)])
    seen = DraftContext(tokens, hidden, lengths, [context] * rows)
    draft, tree = 0.0, root_only(tokens[:, -1])
    if nodes:
        for row in range(rows):
            for state in drafter.slots:
                state.enter(row, tokens[row, :context].cpu().numpy())
        for _ in range(2):  # the first time it reads the whole text, later on what an ordinary step brings
            drafter.prepare(seen)
            drafter.propose(seen, Ask(nodes))
        draft = timed(lambda: drafter.propose(seen, Ask(nodes)), base.device)
        tree = drafter.propose(seen, Ask(nodes))
    kv_length = context + nodes + 1
    if is_asynchronous(base.device):
        kv_length = padded_length(kv_length, cache.length)
    asked = TreeNodes(
        tokens=tree.tokens.clamp_min(0),
        lengths=lengths,
        positions=lengths[:, None] + tree.depths,
        kv_length=kv_length,
        parents=tree.parents,
        ancestors=tree.ancestors(),
    )
    return draft, timed(lambda: base.verify(cache, asked), base.device)


def write_report(folder: Path) -> str:
    """Write the table and the plot from `costs.json` in `folder`. Return the table."""
    record = json.loads((folder / COSTS_FILE).read_text(encoding="utf-8"))
    points = [Point(**point) for point in record["points"]]
    about, best, cache = record["environment"], record["machine"], record["cache"]
    plain = {(point.rows, point.context): point.verify for point in points if not point.nodes}
    rows = [
        {
            "nodes": point.nodes,
            "rows": point.rows,
            "context": point.context,
            "draft ms": f"{1e3 * point.draft:.2f}",
            "verify ms": f"{1e3 * point.verify:.2f}",
            "roofline ms": f"{1e3 * point.least:.2f}",
            "roofline ÷ verify": f"{point.least / point.verify:.2f}",
            "step ÷ plain": f"{(point.draft + point.verify) / plain[point.rows, point.context]:.2f}",
            "draft share": f"{point.draft / (point.draft + point.verify):.0%}",
        }
        for point in points
    ]
    table = markdown_table(rows)
    page = (
        f"# What a step costs\n\n{machine(about)}, {about['threads']} threads, {about['dtype']}, the base's forward "
        f"{'compiled' if record['compiled'] else 'as transformers runs it'}. The machine reads "
        f"{best['bytes_per_second'] / 1e9:.0f} GB/s and does {best['operations_per_second'] / 1e9:.0f} GFLOP/s. A KV "
        f"cache of {cache['slots']} slots of {cache['length']} positions takes {cache['bytes'] / 2**20:.0f} MiB. "
        f"`{about['command']}`, commit {about['commit']}.\n\nDrafting is timed with a complete search. Decoding on a "
        f"CPU leaves improbable prefixes out.\n\n{table}\n\n![step times]({PLOT_FILE})\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    plot(points).savefig(folder / PLOT_FILE, dpi=150)
    return table


def plot(points: Sequence[Point]) -> Figure:
    """Plot milliseconds over nodes, rows and context."""
    from matplotlib.figure import Figure  # not everywhere where times are measured

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), _HELD, strict=True):
        others = {other: value for other, value in _HELD.items() if other != name}
        line = [point for point in points if all(getattr(point, key) == value for key, value in others.items())]
        line.sort(key=lambda point: int(getattr(point, name)))
        over = [getattr(point, name) for point in line]
        for part, label in (("draft", "draft"), ("verify", "verify"), ("least", "verify, roofline")):
            style = ":" if part == "least" else "-"
            axes.plot(
                over, [1e3 * getattr(point, part) for point in line], style, marker="o", markersize=3, label=label
            )
        axes.set(xlabel=name, ylabel="ms", title=", ".join(f"{value} {other}" for other, value in others.items()))
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


if __name__ == "__main__":
    main()
