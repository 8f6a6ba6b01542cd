"""Speed of decoding by this engine, plain and with a drafter, and by the ways that transformers offers.

    python -m benchmarks.speed --output benchmarks/results/speed

Decoding is greedy, on GSM8K's test questions, alone and after other questions. Each way has a process of its own,
because the compute threads of several ways in one process slow each other down. The processes run one at a time, and
anew for each batch size and round.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from transformers import GenerationConfig

from benchmarks.transformers_decoder import padding, transformers_decoder
from drafter.devices import in_passing_thread, synchronise
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import Decoder, Run, decode_all
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.questions import QuestionError, encode, read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.prepacked import as_loaded
from drafter.text.tokenizers import load_tokenizer

SPEED_FILE = "speed.json"
TABLE_FILE = "speed.md"
BATCHES = (1, 4, 16, 64)
_LONG = 512
"""Approximate number of tokens of a long prompt."""
_FEWEST = 8
"""Least number of prompts of a cell. A larger batch has as many as fill it."""
_QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "gsm8k" / "test.jsonl"

Way = Callable[[BaseModel, Any, str, int, int], Decoder]
"""Makes a decoder of a base, its tokeniser, a drafter, a batch size and the length of the longest text."""


@dataclass(frozen=True)
class Cell:
    """One way at one batch size, in one round.

    Args:
        way: Name of the way.
        context: `short` or `long` prompts.
        batch: Number of texts decoded together.
        round: Number of the round, from 0.
        seconds: Seconds for all prompts, prefills included.
        tokens: Number of new tokens of each prompt.
        texts: Digests of these tokens.
        beta: New tokens per base forward, if it is known.
    """

    way: str
    context: str
    batch: int
    round: int
    seconds: float
    tokens: list[int]
    texts: list[str]
    beta: float | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / self.seconds


def _engine(drafted: bool, compiled: bool) -> Way:
    def make(base: BaseModel, tokenizer: Any, drafter: str, batch: int, longest: int) -> Decoder:
        name, nodes = (drafter, useful_nodes(base.device)) if drafted else ("none", 0)
        config = EngineConfig(batch, longest, compile=compiled, kept_rows=0, max_queue=max(batch, _FEWEST))
        return partial(decode_all, Engine(base, load_drafter(name, base, nodes), tokenizer, config))

    return make


def _generate(**settings: Any) -> Way:
    def make(base: BaseModel, tokenizer: Any, drafter: str, batch: int, longest: int) -> Decoder:
        return transformers_decoder(base.model, base.eos_token_ids, batch, padding(tokenizer), **settings)

    return make


def _generate_batch(base: BaseModel, tokenizer: Any, drafter: str, batch: int, longest: int) -> Decoder:
    """Return a decoder with transformers' continuous batching. Every call takes all prompts and starts it anew."""

    def decode(requests: Sequence[Request]) -> Run:
        ends = sorted(base.eos_token_ids)
        limit, pad = requests[0].sampling.max_new_tokens, padding(tokenizer)
        settings = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=ends, pad_token_id=pad)
        synchronise(base.device)
        start = time.perf_counter()
        with as_loaded(base.model):
            made = base.model.generate_batch([list(request.prompt_ids) for request in requests], settings)
        return Run(time.perf_counter() - start, [list(one.generated_tokens) for one in made.values()])

    return decode


PLAIN, GENERATE = "plain decoding", "transformers generate"
WAYS: dict[str, Way] = {
    PLAIN: _engine(drafted=False, compiled=False),
    f"{PLAIN}, compiled": _engine(drafted=False, compiled=True),
    "drafter": _engine(drafted=True, compiled=False),
    "drafter, compiled": _engine(drafted=True, compiled=True),
    GENERATE: _generate(),
    f"{GENERATE}, static cache": _generate(cache_implementation="static"),
    f"{GENERATE}, prompt lookup": _generate(prompt_lookup_num_tokens=10),
    "transformers continuous batching": _generate_batch,
}
_ALONE = {f"{GENERATE}, prompt lookup"}
"""Ways that decode only one text at a time."""
_TOGETHER = {"transformers continuous batching"}
"""Ways that are not measured at batch 1."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table. With `--way`, this is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"folder for {SPEED_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="ctc", help="of this engine (default: %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    try:
        if args.way is not None:
            measure(args)
            return
        if args.output is None:
            parser.error("--output is needed")
        base = in_passing_thread(lambda: load_base(args.model, dtype=args.dtype))
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    command = shlex.join(["python", "-m", "benchmarks.speed", *given])
    record: dict[str, Any] = {"environment": environment(base, command), "drafter": args.drafter, "cells": []}
    del base
    for turn in range(args.rounds):
        # All ways of a batch size run one after another, because other load on the machine changes within minutes.
        for batch, way in itertools.product(args.batches, WAYS):
            process = [sys.executable, "-m", "benchmarks.speed", *given, "--batches", str(batch), "--way", way]
            found = subprocess.run(process, stdout=subprocess.PIPE, text=True, check=True).stdout
            cells = [Cell(**json.loads(line), round=turn) for line in found.splitlines() if line.startswith("{")]
            for cell in cells:
                print(f"round {turn + 1}, {way}, {cell.context}, batch {batch}: {cell.rate:.0f} tokens/s", flush=True)
            record["cells"] += [asdict(cell) for cell in cells]
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SPEED_FILE, record)
    print(write_table(args.output))


def measure(args: argparse.Namespace) -> None:
    """Print a JSON object for each cell of one way."""

    def load() -> BaseModel:
        return load_base(args.model, dtype=args.dtype)

    base, tokenizer = in_passing_thread(load), load_tokenizer(args.model)
    for batch in args.batches:
        if (args.way in _ALONE and batch > 1) or (args.way in _TOGETHER and batch == 1):
            continue
        prompts = {context: prompts_of(tokenizer, context, max(batch, _FEWEST)) for context in ("short", "long")}
        longest = max(len(ids) for some in prompts.values() for ids in some) + args.max_new_tokens
        decode = WAYS[args.way](base, tokenizer, args.drafter, batch, longest)
        for context, some in prompts.items():
            requests = [Request(ids, SamplingParams(args.max_new_tokens)) for ids in some]
            decode(requests[: max(batch, 2)])  # A warm-up, since some work is done when it is first needed.
            run = decode(requests)
            beta = mean_acceptance_length(total(run.counts)) if run.counts else None
            cell = {"way": args.way, "context": context, "batch": batch, "seconds": run.seconds}
            made = {"tokens": list(map(len, run.outputs)), "texts": list(map(digest, run.outputs)), "beta": beta}
            print(json.dumps(cell | made), flush=True)


def digest(tokens: Sequence[int]) -> str:
    """Return what tells texts apart, and is short."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:8]


def prompts_of(tokenizer: Any, context: str, count: int, files: Sequence[Path] = (_QUESTIONS,)) -> list[list[int]]:
    """Return the token ids of `count` questions, of all files in turn.

    A `long` prompt has as many other questions before it as fit.
    """
    questions = [[one.turns[0] for one in read_questions(file, None)] for file in files]

    def question(place: int) -> str:
        some = questions[place % len(questions)]
        return some[place // len(questions) % len(some)]

    prompts = []
    for place in range(count):
        text, before = question(place), count + place
        ids = encode(tokenizer, [{"role": "user", "content": text}])
        while context == "long":
            text, before = f"{question(before)}\n\n{text}", before + count
            longer = encode(tokenizer, [{"role": "user", "content": text}])
            if len(longer) > _LONG:
                break
            ids = longer
        prompts.append(ids)
    return prompts


def write_table(folder: Path) -> str:
    """Write `speed.md` from `speed.json` in `folder`. Return the tables."""
    record = json.loads((folder / SPEED_FILE).read_text(encoding="utf-8"))
    cells = [Cell(**cell) for cell in record["cells"]]
    about = record["environment"]
    parts = [
        "# Speed",
        f"{machine(about)}, {about['threads']} threads, {about['dtype']}; greedy; drafter `{record['drafter']}`, node "
        f"budget `auto`; medians of {1 + max(cell.round for cell in cells)} rounds, ratios within a round. "
        f"`{about['command']}`, commit {about['commit']}.",
        "Prefills are part of the time. `generate_batch` (continuous batching) starts anew with every call, which "
        "takes some seconds; `benchmarks.endpoint.serving` measures it while it runs.",
    ]
    for context in dict.fromkeys(cell.context for cell in cells):
        for batch in sorted({cell.batch for cell in cells}):
            parts += [
                f"## {context.capitalize()} prompts, batch {batch}",
                speed_table([cell for cell in cells if (cell.context, cell.batch) == (context, batch)]),
            ]
    (folder / TABLE_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return "\n\n".join(parts[3:])


def speed_table(cells: Sequence[Cell]) -> str:
    """Return the speed of every way, absolute and relative, of the cells of one batch size and context."""
    by_way = {way: [cell for cell in cells if cell.way == way] for way in dict.fromkeys(cell.way for cell in cells)}

    def relative(some: Sequence[Cell], to: str) -> str:
        return f"{median(one.rate / other.rate for one, other in zip(some, by_way[to], strict=True)):.2f}"

    rows = []
    for way, some in by_way.items():
        texts = [text for cell in some for text in cell.texts]
        plain = [text for cell in by_way[PLAIN] for text in cell.texts]
        rows.append(
            {
                "way": way,
                "tokens/s": f"{median(cell.rate for cell in some):.0f}",
                "÷ plain decoding": relative(some, PLAIN),
                "÷ generate": relative(some, GENERATE),
                "β": "" if some[0].beta is None else f"{some[0].beta:.2f}",
                "same texts": f"{sum(a == b for a, b in zip(texts, plain, strict=True))} of {len(texts)}",
            }
        )
    return markdown_table(rows)


if __name__ == "__main__":
    main()
