"""A job that extracts records by JSON schemas: what schemas cost, and what drafts bring under them.

    python -m benchmarks.records --output benchmarks/results/records-smollm2

Decoding is greedy. The arms take turns, and another one begins each round; the medians are of ratios within a round.
All arms under schemas must give the same tokens, and `jsonschema` must accept each record that ends within them;
otherwise the run fails.
OpenVINO GenAI decodes the same prompts under the same schemas, in an environment and a process of its own; if it cannot
be installed, it is left out, and the record says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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
_WARM_UP = 16
"""New tokens of a record before another engine is timed."""
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
    record |= {"load": os.getloadavg()[0], "cells": [], "shares": [], "left_out": []}
    args.output.mkdir(parents=True, exist_ok=True)
    for batch, count in (map(int, one.split("x")) for one in args.cells):
        job, some = Job(base, tokenizer, tasks(count)), Job(base, tokenizer, tasks(min(count, _CLOCKED)))
        record["shares"] += [asdict(share_of(some, arm, batch)) for arm in arms if not arm.free]
        with ExitStack() as stack:
            peer = None if args.no_peer else _Peer(job, args.model, batch, record)
            if peer is not None:
                stack.callback(peer.close)
            expected = job.decode(PLAIN, batch).outputs
            for turn in range(args.rounds):
                shift = turn % len(arms)
                cells = list(measure_turn(job, [*arms[shift:], *arms[:shift]], batch, turn, expected))
                cells += [] if peer is None else peer.cells(turn)
                record["cells"] += [asdict(cell) for cell in cells]
                write_json(args.output / RECORD_FILE, record)
                (args.output / TABLE_FILE).write_text(page(record), encoding="utf-8")
                rates = ", ".join(f"{cell.arm} {cell.rate:.0f}" for cell in cells)
                print(f"batch {batch}, round {turn + 1}, tokens/s: {rates}", flush=True)


class _Peer:
    """The other engine at a batch size; after a failure, which goes into the record, it has no more cells."""

    def __init__(self, job: Job, model: Path, batch: int, record: dict[str, Any]) -> None:
        self._job, self._batch, self._record = job, batch, record
        self._process: Running | None = None
        prompts = [list(one.prompt_ids) for one in job.requests()]
        self._work = Work(prompts, MOST_TOKENS, [json.dumps(one.schema) for one in job.tasks])
        settings: dict[str, Any] = {"model": str(model), "dtype": "float32", "ends": sorted(job.base.eos_token_ids)}
        settings |= {"threads": record["environment"]["threads"], "longest": 2 * MOST_TOKENS + 256}
        try:
            self._process = starter(cache_folder(), job.base.fingerprint, settings)(_PEER, batch)
            record["environment"]["versions"] |= self._process.versions
            first = slice(len(SCHEMAS))  # one of each kind
            self._process.decode(Work(prompts[first], _WARM_UP, self._work.schemas[first]))
        except PeerError as error:
            self._leave_out(error)

    def cells(self, turn: int) -> list[Cell]:
        if self._process is None:
            return []
        try:
            done = self._process.decode(self._work)
        except PeerError as error:
            self._leave_out(error)
            return []
        texts = [without_end(tokens, self._job.base.eos_token_ids) for tokens in done.tokens]
        valid = self._job.valid([self._job.tokenizer.decode(tokens) for tokens in texts])
        return [Cell(_PEER.engine, self._batch, turn, done.seconds, len(texts), valid, sum(map(len, texts)))]

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _leave_out(self, error: PeerError) -> None:
        self.close()
        self._process = None
        self._record["left_out"].append(f"{_PEER.engine}, batch {self._batch}: {error}")


if __name__ == "__main__":
    main()
