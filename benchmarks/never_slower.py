"""Speed of `auto` ÷ plain decoding, γ, from the first token: by batch size, length of a run, and kind of text.

    python -m benchmarks.never_slower --output benchmarks/results/never-slower
    python -m benchmarks.never_slower --model HuggingFaceTB/SmolLM2-135M-Instruct --output build/never-slower

Decoding is greedy. Every run begins with a new engine, which knows no text yet; the steps' latencies are kept from the
start before. The drafters take turns, in both orders, and the medians are of ratios within a round. With `--neighbour`
another process takes one core every other second.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drafter.devices import in_passing_thread
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.questions import encode, read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE = "never-slower.json", "never-slower.md"
CELLS = ("1x8", "2x8", "4x8", "8x8", "4x32", "16x32", "64x64")
"""Batch size and number of prompts."""
PLAIN, AUTO = "none", "auto"
DATA = Path(__file__).resolve().parents[1] / "data"
KINDS = {
    "arithmetic": "gsm8k/test.jsonl",
    "chat": "chat-prompts/questions.jsonl",
    "records": "drafter-prompts/records.jsonl",
    "code": "drafter-prompts/edits.jsonl",
    "random": None,
}
"""Prompts by kind; `random` are random tokens."""
_RANDOM_TOKENS = 48
_NEIGHBOUR = """
import time
while True:
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass
    time.sleep(1)
"""


@dataclass(frozen=True)
class Cell:
    """One run of one drafter."""

    drafter: str
    kind: str
    batch: int
    prompts: int
    round: int
    tokens: int
    seconds: float
    start: float  # seconds to begin: loading the drafter, latencies
    first: float  # seconds from the first submission to the first token

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="target model (default: the embedded one)")
    parser.add_argument("--drafters", nargs="*", default=[], help="to compare with, beside none and auto")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="batch sizes and numbers of prompts, such as 4x32")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--neighbour", action="store_true", help="let another process take a core every other second")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    command = shlex.join(["python", "-m", "benchmarks.never_slower", *given])
    record: dict[str, Any] = {"environment": environment(base, command), "rounds": args.rounds, "cells": []}
    args.output.mkdir(parents=True, exist_ok=True)
    with neighbour() if args.neighbour else nullcontext():
        for kind in args.kinds:
            for batch, prompts in (map(int, one.split("x")) for one in args.cells):
                cells = measure(base, tokenizer, args, kind, batch, prompts)
                record["cells"] += [asdict(cell) for cell in cells]
                write_json(args.output / RECORD_FILE, record)
                write_table(args.output)
                print(f"{kind}, batch {batch}, {prompts} prompts: {ratios(cells)}", flush=True)


@contextmanager
def neighbour() -> Iterator[None]:
    """Let another process take a core every other second."""
    process = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(
    base: BaseModel, tokenizer: Any, args: argparse.Namespace, kind: str, batch: int, prompts: int
) -> list[Cell]:
    """Decode the same prompts by each drafter in every round, and check that the tokens are the same."""
    requests = requests_of(tokenizer, kind, prompts, args.max_new_tokens)
    longest = max(len(one.prompt_ids) for one in requests) + args.max_new_tokens
    config = EngineConfig(batch, longest, max_queue=len(requests))
    names, expected, cells = [PLAIN, AUTO, *args.drafters], None, []
    for turn in range(-1, args.rounds):  # the first one warms up, and measures latencies
        for name in names if turn % 2 else reversed(names):
            began = time.perf_counter()
            drafter = load_drafter(name, base, useful_nodes(base.device))
            engine = Engine(base, drafter, tokenizer, config, drafter_name=name)
            start = time.perf_counter() - began
            first, seconds, tokens = decode(engine, requests)
            expected = expected or tokens
            if tokens != expected:
                raise AssertionError(f"{name} gave other tokens: {kind}, batch {batch}, {prompts} prompts")
            if turn >= 0:
                cells.append(Cell(name, kind, batch, prompts, turn, sum(map(len, tokens)), seconds, start, first))
    return cells


def decode(engine: Engine, requests: Sequence[Request]) -> tuple[float, float, list[list[int]]]:
    """Return the seconds to the first token and to the last, and all tokens."""
    began, first = time.perf_counter(), 0.0
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
        if not first and engine.state().output_tokens:
            first = time.perf_counter() - began
    return first, time.perf_counter() - began, [handle.result(0).token_ids for handle in handles]


def requests_of(tokenizer: Any, kind: str, count: int, max_new_tokens: int) -> list[Request]:
    """Return greedy requests of a kind; a file's prompts begin again where it has too few."""
    sampling, file = SamplingParams(max_new_tokens), KINDS[kind]
    if file is None:
        choices = random.Random(0).choices(range(len(tokenizer)), k=count * _RANDOM_TOKENS)
        return [Request(choices[at : at + _RANDOM_TOKENS], sampling) for at in range(0, len(choices), _RANDOM_TOKENS)]
    questions = read_questions(DATA / file)[:count]
    prompts = [encode(tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in questions]
    return [Request(prompts[place % len(prompts)], sampling) for place in range(count)]


def ratios(cells: Sequence[Cell]) -> dict[str, float]:
    """Return each drafter's γ: the median over rounds of its rate ÷ plain decoding's."""
    by_name = {
        name: [cell for cell in cells if cell.drafter == name] for name in dict.fromkeys(c.drafter for c in cells)
    }
    plain = by_name.pop(PLAIN)
    return {
        name: round(median(one.rate / other.rate for one, other in zip(some, plain, strict=True)), 3)
        for name, some in by_name.items()
    }


def write_table(folder: Path) -> None:
    """Write `never-slower.md` from `never-slower.json` in `folder`."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    cells, about = [Cell(**cell) for cell in record["cells"]], record["environment"]
    groups: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.kind, cell.batch, cell.prompts), []).append(cell)
    rows = []
    for (kind, batch, prompts), some in groups.items():
        plain = [cell.rate for cell in some if cell.drafter == PLAIN]
        found = {name: f"{gamma:.2f}" for name, gamma in ratios(some).items()}
        rows.append(
            {"text": kind, "batch": batch, "prompts": prompts, "plain tokens/s": f"{median(plain):.0f}", **found}
        )
    starts = [cell for cell in cells if cell.drafter == AUTO]
    parts = [
        "# Never slower",
        f"{machine(about)}, {about['threads']} threads, {about['dtype']}; greedy; γ, tokens per second ÷ plain "
        f"decoding's, medians of {record['rounds']} rounds in both orders. `{about['command']}`, commit "
        f"{about['commit']}. All drafters gave the same tokens. `auto` began in "
        f"{median(cell.start for cell in starts):.2f} s (median), with latencies that an earlier start had kept.",
        markdown_table(rows),
    ]
    (folder / TABLE_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
