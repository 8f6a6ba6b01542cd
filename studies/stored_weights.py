"""A GGUF file whose weights stay as they are stored: memory and speed beside the same weights in floating point.

    python -m studies.stored_weights --model FILE.gguf --copy FOLDER --output studies/results/stored-weights

Memory is that of a process of its own for each way, which loads the model and decodes a prompt. For speed, all ways
take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from drafter.devices import in_passing_thread
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all, room_for
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE = "stored_weights.json", "stored_weights.md"
_PROMPT, _NEW = 24, 64
_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Way:
    """A way to load a model: its name, the model, and whether it is dequantised."""

    name: str
    model: str
    dequantize: bool = False


@dataclass(frozen=True)
class Cell:
    """What a way takes.

    Args:
        way: Its name.
        memory: Bytes that a process of its own has resident, by what it has done.
        rates: Tokens per second in each round, by the number of rows.
    """

    way: str
    memory: dict[str, int]
    rates: dict[int, list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--copy", help="folder of a copy of its weights in bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    ways = [Way("as stored", args.model), Way("dequantised", args.model, dequantize=True)]
    ways += [Way("copy in bf16", args.copy)] if args.copy else []
    memory = {way.name: memory_of(way) for way in ways}
    bases = [in_passing_thread(partial(load_base, way.model, dequantize=way.dequantize)) for way in ways]
    rates: dict[str, dict[int, list[float]]] = {way.name: {rows: [] for rows in args.rows} for way in ways}
    for rows in args.rows:
        requests = requests_of(bases[0], rows)
        engines = [engine_of(base, way.model, requests) for base, way in zip(bases, ways, strict=True)]
        for turn in range(args.rounds + 1):  # the first one is not counted
            for way, engine in zip(ways, engines, strict=True):
                run = decode_all(engine, requests)
                if turn:
                    rates[way.name][rows].append(sum(map(len, run.outputs)) / run.seconds)
    record = {
        "environment": environment(bases[0], shlex.join(["python", "-m", "studies.stored_weights", *given])),
        "rounds": args.rounds,
        "cells": [asdict(Cell(way.name, memory[way.name], rates[way.name])) for way in ways],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    text = page(record)
    (args.output / TABLE_FILE).write_text(text, encoding="utf-8")
    print(text)


def requests_of(base: BaseModel, rows: int) -> list[Request]:
    """Return requests of random tokens, decoded greedily to the same length."""
    source = random.Random(0)
    prompts = [[source.randrange(base.vocab_size) for _ in range(_PROMPT)] for _ in range(rows)]
    return [Request(prompt, SamplingParams(_NEW, ignore_eos=True)) for prompt in prompts]


def engine_of(base: BaseModel, model: str, requests: Sequence[Request]) -> Engine:
    """Return an engine that decodes plainly, with a row for each request."""
    config = room_for(requests, len(requests))
    return Engine(base, load_drafter("none", base, useful_nodes(base.device)), load_tokenizer(model), config)


def memory_of(way: Way) -> dict[str, int]:
    """Return what `tell_memory` prints in a process of its own."""
    program = f"from studies.stored_weights import tell_memory; tell_memory({way.model!r}, {way.dequantize})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def tell_memory(model: str, dequantize: bool) -> None:
    """Load a model and decode a prompt in this process; print the bytes that it has resident, by what it has done."""
    found = {"imports": _status("VmRSS")}
    base = in_passing_thread(lambda: load_base(model, dequantize=dequantize))
    found |= {"most in loading": _status("VmHWM"), "loaded": _status("VmRSS")}
    requests = requests_of(base, 1)
    engine = engine_of(base, model, requests)
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    decode_all(engine, requests)
    print(json.dumps(found | {"most in decoding": _status("VmHWM")}))


def _status(field: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def page(record: dict[str, Any]) -> str:
    """Return the table with its heading."""
    about = record["environment"]
    cells = [Cell(**one) for one in record["cells"]]
    rows = []
    for cell in cells:
        row = {"weights": cell.way}
        row |= {f"{name}, MiB": f"{size / 2**20:.0f}" for name, size in cell.memory.items()}
        for count, rates in cell.rates.items():
            last = cells[-1].rates[count]
            ratio = median(one / other for one, other in zip(rates, last, strict=True))
            row |= {f"tokens/s, {count} rows": f"{median(rates):.0f}", f"÷ last, {count}": f"{ratio:.2f}"}
        rows.append(row)
    return "\n\n".join(
        [
            "# Weights as they are stored",
            f"{machine(about)}, {about['threads']} threads; base of {about['base']['parameters']:,} parameters; plain "
            f"decoding of {_NEW} tokens after {_PROMPT}; medians of {record['rounds']} rounds, in which the ways take "
            f"turns. `{about['command']}`, commit {about['commit']}.",
            markdown_table(rows),
            "Memory is what a process of its own has resident, with one row. ÷ last: relative to the last line, in the "
            "same round.\n",
        ]
    )


if __name__ == "__main__":
    main()
