"""Time of multiplying rows by a linear layer's weights on a CPU: as PyTorch does it, and prepacked.

    python -m studies.products --output studies/results/products

Several layers of one shape take turns, as the layers of a model do, so that weights do not stay in a core's cache.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.costs import timed
from drafter.devices import in_passing_thread
from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.target_model.loading import load_base
from drafter.target_model.prepacked import as_loaded, prepack

PRODUCTS_FILE, TABLE_FILE = "products.json", "products.md"
SHAPES = ((256, 704), (2048, 2048), (4096, 4096))
ROWS = (1, 2, 4, 9, 17, 33, 64, 256, 1024)
_WEIGHTS = 1 << 24
"""Number of weights of all layers of a shape together."""
_ORIGINS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precisions of the checkpoints that the fp32 weights may come from."""


@dataclass(frozen=True)
class Product:
    """Seconds of one product.

    Args:
        width: Width of the rows.
        outputs: Outputs of the layer.
        rows: Number of rows.
        origin: Precision of the checkpoint that the weights come from.
        torch: Seconds of PyTorch's layer.
        prepacked: Seconds of the prepacked layer.
    """

    width: int
    outputs: int
    rows: int
    origin: str
    torch: float
    prepacked: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {PRODUCTS_FILE} and {TABLE_FILE}")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base = in_passing_thread(lambda: load_base(EMBEDDED_BASE, device="cpu"))
    record = {
        "environment": environment(base, shlex.join(["python", "-m", "studies.products", *given])),
        "products": [
            asdict(product)
            for width, outputs in SHAPES
            for origin in _ORIGINS
            for product in measure(width, outputs, origin, args.rows)
        ],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / PRODUCTS_FILE, record)
    page = tables(record)
    (args.output / TABLE_FILE).write_text(page, encoding="utf-8")
    print(page)


@torch.inference_mode()
def measure(width: int, outputs: int, origin: str, counts: Sequence[int]) -> list[Product]:
    """Time both ways at each number of rows."""
    torch.manual_seed(0)
    with torch.inference_mode(mode=False):  # Prepacked layers check the version of their weights.
        layers = nn.ModuleList(nn.Linear(width, outputs, bias=False) for _ in range(_WEIGHTS // (width * outputs)))
        layers.to(_ORIGINS[origin]).float()
        prepack(layers)
    found = []
    for count in counts:
        rows = torch.randn(count, width)
        prepacked = _seconds(layers, rows)
        with as_loaded(layers):
            found.append(Product(width, outputs, count, origin, _seconds(layers, rows), prepacked))
    return found


def _seconds(layers: nn.ModuleList, rows: torch.Tensor) -> float:
    """Return the seconds of one layer's product."""
    return timed(lambda: [layer(rows) for layer in layers], rows.device) / len(layers)


def tables(record: dict[str, Any]) -> str:
    """Return a page with a table of microseconds."""
    about = record["environment"]
    rows = [
        {
            "weights": f"{one.width} × {one.outputs}",
            "came from": one.origin,
            "rows": one.rows,
            "PyTorch µs": f"{1e6 * one.torch:.0f}",
            "prepacked µs": f"{1e6 * one.prepacked:.0f}",
            "ratio": f"{one.torch / one.prepacked:.2f}",
        }
        for one in (Product(**product) for product in record["products"])
    ]
    return (
        f"# Products of a linear layer\n\n{machine(about)}, {about['threads']} threads, fp32; medians. "
        f"`{about['command']}`, commit {about['commit']}.\n\n{markdown_table(rows)}\n"
    )


if __name__ == "__main__":
    main()
