"""Rows that take KV memory as they grow against slots of full length, in the same memory.

    python -m studies.growing_rows --model MODEL --output studies/results/growing-rows

The requests are of random tokens and decoded greedily to a length that is drawn beforehand, evenly on a logarithmic
scale: many short ones and some long. Who submits them does not tell: each may become as long as the longest.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from drafter.devices import in_passing_thread
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE = "growing_rows.json", "growing_rows.md"
_LONGEST_PROMPT = 40


@dataclass(frozen=True)
class Cell:
    """One way to share the memory.

    Args:
        way: Its name.
        slots: Rows that may be decoded together.
        gib: GiB of the KV cache.
        together: Mean number of rows decoded together, over the steps until half of the requests have ended. After that
            too few are left to fill the memory.
        most: Greatest number of rows decoded together.
        preemptions: How often a row gave its memory up and was read again later.
        tokens: New tokens.
        seconds: For all requests.
    """

    way: str
    slots: int
    gib: float
    together: float
    most: int
    preemptions: int
    tokens: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="none", help="(default: %(default)s)")
    parser.add_argument("--gib", type=float, default=2.0, help="memory of the KV cache (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=256, help="of the rows that grow (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=50, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=2000, help="(default: %(default)s)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model)), load_tokenizer(args.model)
    requests = requests_of(args.requests, args.shortest, args.longest, base.vocab_size)
    command = shlex.join(["python", "-m", "studies.growing_rows", *given])

    def engine(slots: int, gib: float | None) -> Engine:
        nodes = useful_nodes(base.device)
        config = EngineConfig(slots, args.longest, max_queue=len(requests), kv_gib=gib)
        return Engine(base, load_drafter(args.drafter, base, nodes), tokenizer, config)

    def full() -> Engine:
        return engine(full_slots(base, engine(1, None).batch.capacity, args.gib), None)

    found = {
        way: measure(way, make(), requests)
        for way, make in (("slots of full length", full), ("rows that grow", lambda: engine(args.slots, args.gib)))
    }
    texts = [outputs for _, outputs in found.values()]
    if texts[0] != texts[1]:
        raise SystemExit("error: the two ways gave different tokens")
    record = {
        "environment": environment(base, command),
        "requests": {"number": args.requests, "shortest": args.shortest, "longest": args.longest},
        "cells": [asdict(cell) for cell, _ in found.values()],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    text = page(record)
    (args.output / TABLE_FILE).write_text(text, encoding="utf-8")
    print(text)


def requests_of(count: int, shortest: int, longest: int, vocab_size: int) -> list[Request]:
    """Return requests of random tokens with lengths, prompt and output together, between the two, few of them long."""
    source = random.Random(0)
    requests = []
    for _ in range(count):
        length = round(shortest * (longest / shortest) ** source.random())
        prompt = [source.randrange(vocab_size) for _ in range(source.randint(1, min(_LONGEST_PROMPT, length - 1)))]
        requests.append(Request(prompt, SamplingParams(length - len(prompt), ignore_eos=True)))
    return requests


def full_slots(base: BaseModel, length: int, gib: float) -> int:
    """Return how many slots of `length` positions the memory holds."""
    return max(1, int(gib * 2**30) // (length * base.new_cache(1, 1).nbytes))


def measure(way: str, engine: Engine, requests: Sequence[Request]) -> tuple[Cell, list[list[int]]]:
    """Decode all requests; return what it took, and their new tokens."""
    handles = [engine.submit(request) for request in requests]
    together, ended = [], 0
    start = perf_counter()
    while not engine.idle:
        if 2 * ended < len(handles):
            together.append(len(engine.scheduler.active))
            ended = sum(handle.future.done() for handle in handles)
        engine.step()
    seconds = perf_counter() - start
    outputs = [handle.result(0).token_ids for handle in handles]
    state = engine.state()
    cell = Cell(
        way=way,
        slots=state.slots,
        gib=engine.batch.cache.nbytes / 2**30,
        together=mean(together),
        most=max(together),
        preemptions=state.preemptions,
        tokens=sum(map(len, outputs)),
        seconds=seconds,
    )
    return cell, outputs


def page(record: dict[str, Any]) -> str:
    """Return the table with its heading."""
    about, asked = record["environment"], record["requests"]
    rows = [
        {
            "way": cell.way,
            "KV cache, GiB": f"{cell.gib:.2f}",
            "rows together, mean": f"{cell.together:.1f}",
            "at most": cell.most,
            "preemptions": cell.preemptions,
            "tokens/s": f"{cell.tokens / cell.seconds:.0f}",
        }
        for cell in (Cell(**one) for one in record["cells"])
    ]
    return "\n\n".join(
        [
            "# Rows that grow",
            f"{machine(about)}, {about['threads']} threads, {about['dtype']}; base of "
            f"{about['base']['parameters']:,} parameters; {asked['number']} requests of {asked['shortest']} to "
            f"{asked['longest']:,} tokens, all at once. `{about['command']}`, commit {about['commit']}. Both ways gave "
            "the same tokens.",
            markdown_table(rows),
            "The mean is over the steps until half of the requests have ended.\n",
        ]
    )


if __name__ == "__main__":
    main()
