"""Time of a CTC head's lattice search on a CPU: in PyTorch, and by our own C++ code.

    python -m studies.searches --output studies/results/searches

The frames are the embedded head's, at anchors in its base's own answers to GSM8K's test questions. At every group of
anchors the ways take turns, so that a disturbance of the machine affects all of them.
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

import torch
from torch import Tensor

from benchmarks.heads import answers
from drafter.ctc.head import CTCHead, NativeSearch
from drafter.ctc.lattice import LATTICE_BEAM
from drafter.devices import in_passing_thread
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import load_head
from drafter.heads.frame_head import last_tokens
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.prepacked import prepack
from drafter.text.tokenizers import load_tokenizer
from drafter.training.targets import base_hidden_states, draft_batch

SEARCHES_FILE, TABLE_FILE = "searches.json", "searches.md"
NODES, ROWS = (7, 15), (1, 4, 16)
_QUESTIONS, _NEW_TOKENS, _ANCHORS = 16, 96, 16
_REPEATS = 3
"""A search is timed this often for each group of anchors. The least time counts."""

Way = Callable[[Tensor, Tensor], object]
"""Searches with frame states `[B, F, d]` and last tokens `[B, c]`."""


@dataclass(frozen=True)
class Search:
    """Median seconds of one kind of search.

    Args:
        nodes: Number of draft nodes of a tree.
        rows: Number of trees searched together.
        least: Probability below which the native search may leave out prefixes.
        in_pytorch: Seconds in PyTorch.
        native: Seconds in C++, as decoding on a CPU searches.
    """

    nodes: int
    rows: int
    least: float
    in_pytorch: float
    native: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {SEARCHES_FILE} and {TABLE_FILE}")
    parser.add_argument("--groups", type=int, default=48, help="groups of anchors of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    base = in_passing_thread(lambda: load_base(EMBEDDED_BASE, device="cpu"))
    head = load_head(EMBEDDED_HEADS / "ctc", base)
    assert isinstance(head, CTCHead)
    prepack(head)
    record = {
        "environment": environment(base, shlex.join(["python", "-m", "studies.searches", *given])),
        "searches": [asdict(search) for search in measure(head, base, args.groups)],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SEARCHES_FILE, record)
    print(write_table(args.output))


@torch.inference_mode()
def measure(head: CTCHead, base: BaseModel, most: int) -> list[Search]:
    """Time every kind of search."""
    found = []
    for nodes in NODES:
        states, recent = frames(head, base, nodes)
        for least in (1 / (nodes + 1), 0.0):
            for rows in ROWS:
                groups = [slice(at, at + rows) for at in range(0, len(states) - rows + 1, rows)]
                groups = groups[:: max(1, len(groups) // most)][:most]
                found.append(_timed(head, base, nodes, least, [(states[group], recent[group]) for group in groups]))
                print(found[-1], file=sys.stderr)
    return found


def frames(head: CTCHead, base: BaseModel, nodes: int) -> tuple[Tensor, Tensor]:
    """Return frame states `[N, F, d]` for trees of `nodes` draft nodes, and the last tokens `[N, c]` before them."""
    texts = answers(base, load_tokenizer(EMBEDDED_BASE), _QUESTIONS, _NEW_TOKENS)
    states, recent = [], []
    for text in texts:
        batch = draft_batch([text], head.config.depth, _ANCHORS)
        hidden = base_hidden_states(base, batch.tokens)
        count = head.frames_for(nodes + 1, "exact")
        states.append(head.module(base.embed(batch.tokens), hidden, batch.anchors, count)[0])
        recent.append(last_tokens(batch.tokens, batch.anchors, head.recent_tokens)[0])
    return torch.cat(states), torch.cat(recent)


def _timed(head: CTCHead, base: BaseModel, nodes: int, least: float, groups: Sequence[tuple[Tensor, Tensor]]) -> Search:
    native = NativeSearch(head, base, LATTICE_BEAM)
    ways: list[Way] = [
        lambda states, recent: head.search(states, recent, base, nodes + 1, "exact"),
        lambda states, recent: native(states, recent, nodes + 1, least),
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    for turn, (states, recent) in enumerate(groups):
        for way in [*range(turn % len(ways), len(ways)), *range(turn % len(ways))]:
            seconds[way].append(min(_seconds(ways[way], states, recent) for _ in range(_REPEATS)))
    return Search(nodes, len(groups[0][0]), least, *map(median, seconds))


def _seconds(way: Way, states: Tensor, recent: Tensor) -> float:
    start = time.perf_counter()
    way(states, recent)
    return time.perf_counter() - start


def write_table(folder: Path) -> str:
    """Write `searches.md` from `searches.json` in `folder`. Return the table."""
    record = json.loads((folder / SEARCHES_FILE).read_text(encoding="utf-8"))
    about = record["environment"]
    table = markdown_table(
        [
            {
                "draft nodes": one.nodes,
                "rows": one.rows,
                "least probability": f"{one.least:.3f}",
                "PyTorch ms": f"{1e3 * one.in_pytorch:.2f}",
                "native ms": f"{1e3 * one.native:.2f}",
                "PyTorch ÷ native": f"{one.in_pytorch / one.native:.1f}",
            }
            for one in (Search(**search) for search in record["searches"])
        ]
    )
    page = (
        f"# Lattice searches on a CPU\n\n{machine(about)}, {about['threads']} threads, {about['dtype']}; medians. "
        f"The native search is that of decoding. `{about['command']}`, commit "
        f"{about['commit']}.\n\n"
        f"{table}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
