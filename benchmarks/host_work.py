"""What the host does by itself in a step, by rows: what a GPU would wait for where it is more than the step before.

    python -m benchmarks.host_work --output benchmarks/results/host-work

As many requests as slots enter in the first step; without drafts all of them end in the last one. The embedded base
decodes them on this machine's CPU. Its own time, the drafter's and that of reading prompts are left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import load_head
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

ROWS = (1, 4, 16, 64, 256)
HOST_FILE, TABLE_FILE = "host_work.json", "host_work.md"
_NODES, _TOKENS, _PROMPT = 7, 24, 12


@dataclass(frozen=True)
class HostWork:
    """Seconds of the host's own work.

    Args:
        way: What is decoded.
        rows: Requests, and slots.
        enter: Seconds of the first step, in which all enter.
        step: Median seconds of the steps between.
        leave: Seconds of the last step, in which all or most leave.
    """

    way: str
    rows: int
    enter: float
    step: float
    leave: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {HOST_FILE} and {TABLE_FILE}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base = load_base(EMBEDDED_BASE, device="cpu")
    record = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.host_work", *given])),
        "work": [asdict(work) for rows in ROWS for work in measure(base, rows)],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / HOST_FILE, record)
    print(write_table(args.output))


def measure(base: BaseModel, rows: int) -> list[HostWork]:
    """Decode in each way."""
    head = load_head(EMBEDDED_HEADS / "ctc", base)
    return [
        _decoded("plain", base, PlainDecoding(), rows),
        _decoded("plain, streamed", base, PlainDecoding(), rows, stream=True),
        _decoded(f"ctc, {_NODES} nodes", base, head.drafter(base, _NODES), rows),
    ]


def _decoded(way: str, base: BaseModel, drafter: Drafter, rows: int, *, stream: bool = False) -> HostWork:
    config = EngineConfig(max_num_seqs=rows, max_model_len=2 * (_PROMPT + _TOKENS), num_draft_tokens=_NODES)
    engine = Engine(base, drafter, load_tokenizer(EMBEDDED_BASE), config)
    for row in range(rows):
        prompt = [100 + (row * 7 + place * 31) % 1000 for place in range(_PROMPT)]
        engine.submit(Request(prompt, SamplingParams(_TOKENS, ignore_eos=True)), stream=stream)
    seconds = []
    while not engine.idle:
        before = engine.state().stage_seconds["host"]
        engine.step()
        seconds.append(engine.state().stage_seconds["host"] - before)
    return HostWork(way, rows, seconds[0], median(seconds[1:-1]), seconds[-1])


def write_table(folder: Path) -> str:
    """Write `host_work.md` from `host_work.json` in `folder`. Return the table."""
    record = json.loads((folder / HOST_FILE).read_text(encoding="utf-8"))
    about = record["environment"]
    table = markdown_table(
        [
            {
                "way": one.way,
                "rows": one.rows,
                "step ms": f"{1e3 * one.step:.2f}",
                "step µs a row": f"{1e6 * one.step / one.rows:.1f}",
                "all enter, ms": f"{1e3 * one.enter:.2f}",
                "all leave, ms": f"{1e3 * one.leave:.2f}",
            }
            for one in sorted((HostWork(**work) for work in record["work"]), key=lambda work: work.way)
        ]
    )
    page = (
        f"# Host work\n\n{machine(about)}, {about['threads']} threads. `{about['command']}`, commit "
        f"{about['commit']}.\n\n{table}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
