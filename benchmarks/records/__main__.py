"""A job that extracts records by JSON schemas: what schemas cost, and what drafts bring under them.

    python -m benchmarks.records --output benchmarks/results/records-smollm2

Decoding is greedy. The arms take turns, and another one begins each round; the medians are of ratios within a round.
All arms under schemas must give the same tokens, and records that `jsonschema` accepts; otherwise the run fails.
OpenVINO GenAI decodes the same prompts under the same schemas, in an environment and a process of its own; if it cannot
be installed, it is left out, and the record says why.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import starter
from benchmarks.peers.cells import without_end
from benchmarks.peers.contenders import PEERS
from benchmarks.peers.environments import PeerError, cache_folder
from benchmarks.peers.rounds import Running
from benchmarks.peers.workers.protocol import Work
from benchmarks.records.measuring import (
    FREE,
    MOST_TOKENS,
    PLAIN,
    Arm,
    Cell,
    Job,
    compile_seconds,
    measure_turn,
    share_of,
)
from benchmarks.records.tables import page
from benchmarks.records.texts import SCHEMAS, tasks
from drafter.devices import in_passing_thread
from drafter.drafters.registry import shipped_head
from drafter.evaluation.environment import environment
from drafter.evaluation.results import write_json
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from recipes.smollm2.__main__ import cache_folder as smollm2

RECORD_FILE, TABLE_FILE = "records.json", "records.md"
CELLS = ("1x16", "8x48")
"""Batch size and number of records."""
_PEER = PEERS["openvino-genai"][0]
_CLOCKED = 16
"""Records of a run with clocks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its page."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", type=Path, default=smollm2(), help="target model (default: SmolLM2)")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="batch sizes and numbers of records, such as 4x32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave OpenVINO GenAI out")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    base, tokenizer = in_passing_thread(lambda: load_base(args.model, device="cpu")), load_tokenizer(args.model)
    head = shipped_head(base)
    arms = [FREE, PLAIN, Arm("forced", "forced"), Arm("auto", "auto"), *([Arm("head", str(head))] if head else [])]
    about = environment(base, shlex.join(["python", "-m", "benchmarks.records", *given]))
    about["versions"]["llguidance"] = version("llguidance")
    compiling = compile_seconds(base, tokenizer)
    record: dict[str, Any] = {"environment": about, "rounds": args.rounds, "compile_seconds": compiling}
    record |= {"cells": [], "shares": [], "left_out": []}
    args.output.mkdir(parents=True, exist_ok=True)
    for batch, count in (map(int, one.split("x")) for one in args.cells):
        job = Job(base, tokenizer, tasks(count))
        peer = None if args.no_peer else _started(job, args.model, batch, record)
        expected = job.decode(PLAIN, batch).outputs
        for turn in range(args.rounds):
            shift = turn % len(arms)
            cells = list(measure_turn(job, [*arms[shift:], *arms[:shift]], batch, turn, expected))
            if peer is not None:
                cells.append(_peer_cell(job, peer, batch, turn))
            record["cells"] += [asdict(cell) for cell in cells]
            print(f"batch {batch}, round {turn + 1}: " + ", ".join(f"{c.arm} {c.rate:.0f}" for c in cells), flush=True)
        if peer is not None:
            peer.close()
        some = Job(base, tokenizer, tasks(min(count, _CLOCKED)))
        record["shares"] += [asdict(share_of(some, arm, batch)) for arm in arms if not arm.free]
        write_json(args.output / RECORD_FILE, record)
        (args.output / TABLE_FILE).write_text(page(record), encoding="utf-8")


def _started(job: Job, model: Path, batch: int, record: dict[str, Any]) -> Running | None:
    """Return the other engine's process, which has compiled the schemas; None if there cannot be one."""
    base = job.base
    settings: dict[str, Any] = {"model": str(model), "dtype": "float32", "ends": sorted(base.eos_token_ids)}
    settings |= {"threads": record["environment"]["threads"], "longest": 2 * MOST_TOKENS + 256}
    try:
        process = starter(cache_folder(), base.fingerprint, settings)(_PEER, batch)
        work = _work(job)
        first = slice(len(SCHEMAS))
        seconds = process.decode(Work(work.prompts[first], 1, work.schemas[first])).seconds
    except PeerError as error:
        record["left_out"].append(f"{_PEER.engine}, batch {batch}: {error}")
        return None
    record["compile_seconds"][f"{_PEER.engine}, all with their first tokens"] = seconds
    record["environment"]["versions"] |= process.versions
    return process


def _work(job: Job) -> Work:
    prompts = [list(one.prompt_ids) for one in job.requests()]
    return Work(prompts, MOST_TOKENS, [json.dumps(one.schema) for one in job.tasks])


def _peer_cell(job: Job, peer: Running, batch: int, turn: int) -> Cell:
    done = peer.decode(_work(job))
    texts = [without_end(tokens, job.base.eos_token_ids) for tokens in done.tokens]
    valid = job.valid([job.tokenizer.decode(tokens) for tokens in texts])
    return Cell(_PEER.engine, batch, turn, done.seconds, len(texts), valid, sum(map(len, texts)))


if __name__ == "__main__":
    main()
