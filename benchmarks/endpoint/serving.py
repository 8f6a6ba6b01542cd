"""The endpoint under load: against `transformers serve` with its continuous batching, and against no drafter.

    python -m benchmarks.endpoint.serving --output benchmarks/results/serving

Each server runs alone, with the same model, dtype and questions, greedy. A level is a number of clients, each of which
asks its next question as soon as the last answer is complete. All is measured by the clients: seconds to the first
text, and tokens of all answers a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx2

from benchmarks.endpoint.servers import Server, endpoint, transformers_serve
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import QuestionError, read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.target_model.loading import load_base

SERVING_FILE = "serving.json"
TABLE_FILE = "serving.md"
LEVELS = (1, 8, 32)
OURS, PLAIN, TRANSFORMERS = "this endpoint", "this endpoint, drafter=none", "transformers serve"
_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "test.jsonl"


@dataclass(frozen=True)
class Answered:
    """One answer as its client saw it.

    Args:
        first: Seconds until its first text.
        total: Seconds until its end.
        tokens: Its tokens, by the server's count.
        text: It.
    """

    first: float
    total: float
    tokens: int
    text: str


@dataclass(frozen=True)
class Cell:
    """What one server did at one level in one round.

    Args:
        arm: Which server.
        level: Clients at once.
        round: From 0.
        seconds: From the first question to the last answer.
        answers: By question.
    """

    arm: str
    level: int
    round: int
    seconds: float
    answers: list[Answered]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {SERVING_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="base (default: the embedded one)")
    parser.add_argument("--drafter", default="auto", help="as of drafter serve (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of all servers (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="this endpoint's engines compile the base's forward")
    parser.add_argument("--rounds", type=int, default=3, help="each starts every server anew (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=4, help="of each client, 16 in all at least (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    try:
        base = load_base(args.model, dtype=args.dtype)
        questions = [one.turns[0] for one in read_questions(_QUESTIONS, max(LEVELS) * args.answers)]
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    given = sys.argv[1:] if arguments is None else arguments
    record: dict[str, Any] = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.endpoint.serving", *given])),
        "max_tokens": args.max_tokens,
        "cells": [],
    }
    del base
    model = None if args.model == str(EMBEDDED_BASE) else args.model  # whose heads are known by name
    for turn in range(args.rounds):
        for arm in (OURS, PLAIN, TRANSFORMERS):
            with start(arm, model, args) as server:
                for level in LEVELS:
                    asked = questions[: max(16, level * args.answers)]
                    seconds, answers = asyncio.run(load(server, asked, level, args.max_tokens))
                    cell = Cell(arm, level, turn, seconds, answers)
                    print(f"round {turn + 1}, {arm}, {level} clients: {cell.rate:.0f} tokens/s", file=sys.stderr)
                    record["cells"].append(asdict(cell))
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / SERVING_FILE, record)
    print(write_table(args.output))


def start(arm: str, model: str | None, args: argparse.Namespace) -> AbstractContextManager[Server]:
    """The server of an arm."""
    if arm == TRANSFORMERS:
        return transformers_serve(args.model, args.dtype)
    settings = ["--loading.dtype", args.dtype, "--engine.compile", str(args.compile).lower()]
    return endpoint(model, args.drafter if arm == OURS else "none", settings)


async def load(server: Server, questions: Sequence[str], level: int, max_tokens: int) -> tuple[float, list[Answered]]:
    """Ask all questions, `level` at a time; the seconds that it took, and the answers."""
    found: dict[int, Answered] = {}
    limits = httpx2.Limits(max_connections=level)
    async with httpx2.AsyncClient(base_url=server.address, timeout=600, limits=limits) as client:
        await ask(client, server.model, questions[-1], 8)  # whatever a server puts off until it is asked
        left = iter(enumerate(questions))

        async def ask_on() -> None:
            for place, question in left:
                found[place] = await ask(client, server.model, question, max_tokens)

        begun = time.perf_counter()
        await asyncio.gather(*(ask_on() for _ in range(level)))
        seconds = time.perf_counter() - begun
    return seconds, [found[place] for place in range(len(questions))]


async def ask(client: httpx2.AsyncClient, model: str, question: str, max_tokens: int) -> Answered:
    """Ask one question and read the answer as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    first, tokens, text = None, 0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                if text and first is None:
                    first = time.perf_counter() - begun
    total = time.perf_counter() - begun
    return Answered(total if first is None else first, total, tokens, text)


def write_table(folder: Path) -> str:
    """Write `serving.md` from `serving.json` in `folder`; return the table."""
    record = json.loads((folder / SERVING_FILE).read_text(encoding="utf-8"))
    cells = [
        Cell(**{**cell, "answers": [Answered(**answer) for answer in cell["answers"]]}) for cell in record["cells"]
    ]
    table = load_table(cells)
    about = record["environment"]
    page = (
        f"# The endpoint under load\n\nGreedy answers of up to {record['max_tokens']} tokens to held-out GSM8K "
        f"questions, {about['dtype']}; medians over rounds, ratios of the same round. `{about['command']}`, commit "
        f"{about['commit']}.\n\n{table}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return table


def load_table(cells: Sequence[Cell]) -> str:
    """Every server at every level: medians over rounds, and this endpoint's rate relative to it in the same round."""
    rows = []
    for level in dict.fromkeys(cell.level for cell in cells):
        ours = [cell for cell in cells if (cell.arm, cell.level) == (OURS, level)]
        for arm in dict.fromkeys(cell.arm for cell in cells):
            theirs = [cell for cell in cells if (cell.arm, cell.level) == (arm, level)]
            firsts = [1000 * answer.first for cell in theirs for answer in cell.answers]
            pairs = list(zip(ours, theirs, strict=True))
            same = sum(
                a.text == b.text for one, other in pairs for a, b in zip(one.answers, other.answers, strict=True)
            )
            rows.append(
                {
                    "clients": level,
                    "server": arm,
                    "tokens/s": f"{median(cell.rate for cell in theirs):.0f}",
                    "first text, median ms": f"{median(firsts):.0f}",
                    "95 % ms": f"{quantiles(firsts, n=20)[-1]:.0f}",
                    "this endpoint ÷ it": f"{median(one.rate / other.rate for one, other in pairs):.2f}",
                    "same texts": f"{same} of {len(firsts)}",
                }
            )
    return markdown_table(rows)


if __name__ == "__main__":
    main()
