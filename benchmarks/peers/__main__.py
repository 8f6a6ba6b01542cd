"""This engine beside other engines on this machine, with the same weights and prompts, greedy.

    python -m benchmarks.peers --output benchmarks/results/peers
    python -m benchmarks.peers --model MODEL --drafter HEAD --output benchmarks/results/peers-model

Each peer is installed by pip into an environment of its own, the first time; one that cannot be is left out, and the
record says why. Prompts are questions of GSM8K and of a chat, half of each. Each engine has a process of its own, which
is stopped while another one is measured.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import Cell
from benchmarks.peers.contenders import PEERS, Contender, contenders
from benchmarks.peers.environments import PeerError, cache_folder, python_of
from benchmarks.peers.rounds import Start, measure
from benchmarks.peers.tables import contenders_of, page, plot, settings, table
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.peers.workers.protocol import Settings, Work
from benchmarks.speed import BATCHES, prompts_of
from drafter.devices import in_passing_thread
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import QuestionError
from drafter.evaluation.results import write_json
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE, PLOT_FILE = "peers.json", "peers.md", "peers.png"
CONTEXTS = ("short", "long")
QUESTIONS = tuple(
    Path(__file__).resolve().parents[2] / "data" / file for file in ("gsm8k/test.jsonl", "chat-prompts/questions.jsonl")
)
_FEWEST = 8
"""Least number of prompts. A larger batch has as many as fill it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record, its tables and its plot."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(given)
    drafter = args.drafter or ("ctc" if args.model.resolve() == EMBEDDED_BASE.resolve() else None)
    threads = len(os.sched_getaffinity(0))
    try:
        base = in_passing_thread(lambda: load_base(args.model, dtype=args.dtype, device="cpu"))
        tokenizer = load_tokenizer(args.model)
        prompts = {
            context: prompts_of(tokenizer, context, max(_FEWEST, *args.batches), QUESTIONS) for context in args.contexts
        }
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    ends = sorted(base.eos_token_ids)
    common: dict[str, Any] = {"model": str(args.model), "dtype": args.dtype, "ends": ends, "threads": threads}
    common["longest"] = max(len(ids) for some in prompts.values() for ids in some) + args.max_new_tokens
    measured = [one for one in contenders(args.peers, drafter) if one.is_plain or not args.plain]
    record: dict[str, Any] = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.peers", *given])),
        "rounds": args.rounds,
        "max_new_tokens": args.max_new_tokens,
        "contenders": [asdict(one) for one in measured],
        "versions": {},
        "cells": [],
        "failures": [],
    }
    start = starter(args.environments, base.fingerprint, common)
    del base  # Its memory is the measured ones'.
    args.output.mkdir(parents=True, exist_ok=True)
    for batch in args.batches:
        works = {name: Work(some[: max(_FEWEST, batch)], args.max_new_tokens) for name, some in prompts.items()}
        try:
            found = measure(measured, start, works, batch, args.rounds, ends)
        except PeerError as error:
            raise SystemExit(f"error: this engine fails at batch {batch}: {error}") from error
        record["versions"] |= found.versions
        record["cells"] += [asdict(cell) for cell in found.cells]
        record["failures"] += [asdict(one) for one in found.failures]
        for one in found.failures:
            print(f"{one.contender} is left out at batch {batch}: {one.reason}", flush=True)
        for context, _, some in settings(found.cells):
            print(f"{context} prompts, batch {batch}\n\n{table(some, contenders_of(record))}\n", flush=True)
        write_json(args.output / RECORD_FILE, record)
        (args.output / TABLE_FILE).write_text(page(record, PLOT_FILE), encoding="utf-8")
        cells = [Cell(**cell) for cell in record["cells"]]
        plot(cells, contenders_of(record)).savefig(args.output / PLOT_FILE, dpi=150)


def starter(folder: Path, fingerprint: str, common: dict[str, Any]) -> Start:
    """Return what starts a contender's process.

    Args:
        folder: Holds the environments, and the model in the forms that peers want.
        fingerprint: Of the model.
        common: Settings that all contenders and batch sizes have.
    """
    broken: dict[str, PeerError] = {}

    def start(contender: Contender, batch: int) -> WorkerProcess:
        print(f"starting {contender.name}, batch {batch}", flush=True)
        python, wanted = Path(sys.executable), contender.environment
        if wanted is not None:
            if wanted.name in broken:  # It would take as long to fail again.
                raise broken[wanted.name]
            try:
                python = python_of(wanted, folder)
            except PeerError as error:
                broken[wanted.name] = error
                raise
        forms = folder / "models" / fingerprint / contender.worker
        forms.mkdir(parents=True, exist_ok=True)
        own = Settings(**common, variant=contender.variant, batch=batch, folder=str(forms))
        return WorkerProcess(python, f"benchmarks.peers.workers.{contender.worker}", own)

    return start


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = f"{RECORD_FILE}, {TABLE_FILE} and {PLOT_FILE}"
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {files}")
    parser.add_argument("--model", type=Path, default=EMBEDDED_BASE, help="folder of the base (default: the embedded)")
    parser.add_argument("--drafter", help="draft head of this engine (default: the embedded base's own, or none)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--plain", action="store_true", help="measure plain decoding alone")
    parser.add_argument(
        "--environments", type=Path, default=cache_folder(), help="folder that keeps them (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    main()
