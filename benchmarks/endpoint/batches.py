"""What live requests notice of a batch: their latency beside one of 2,000 lines, against alone.

    python -m benchmarks.endpoint.batches --output benchmarks/results/batches --model MODEL

One server. In each round one client first asks with nobody else there, and then the same questions beside a batch,
which is cancelled at the end of the round; between two questions it rests for a random time, while the batch goes on.
The ratios are of the same question in the same round. The answers must be the same, too.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx2
import torch
from openai import OpenAI

from benchmarks.endpoint.servers import Server, endpoint
from drafter.evaluation.environment import machine, surroundings
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table

BATCHES_FILE, TABLE_FILE = "batches.json", "batches.md"
_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "test.jsonl"
_CHAT = "/v1/chat/completions"
_LONGEST_REST = 2.0  # seconds between two live requests


@dataclass(frozen=True)
class Asked:
    """A live request: seconds until its first text and its end, alone and beside the batch."""

    first: float
    total: float
    first_beside: float
    total_beside: float
    same: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {BATCHES_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", help="of the server (default: the embedded one)")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--questions", type=int, default=12, help="live requests of a round (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of all answers (default: %(default)s)")
    args = parser.parse_args(arguments)
    questions = [one.turns[0] for one in read_questions(_QUESTIONS, args.questions + 500)]
    found: list[Asked] = []
    lines = 0
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--batches.folder", folder, "--limits.seconds", "60"]
        with endpoint(args.model, "auto", settings) as server:
            for turn in range(args.rounds):
                asked, answered = measure_round(server, questions, args, random.Random(turn))
                found, lines = found + asked, lines + answered
                print(f"round {turn + 1}: {answered} lines, {ratio(asked):.2f} × the latency", file=sys.stderr)
    given = sys.argv[1:] if arguments is None else arguments
    record = {
        "environment": surroundings(
            torch.device("cpu"), shlex.join(["python", "-m", "benchmarks.endpoint.batches", *given])
        ),
        "lines": args.lines,
        "lines_answered": lines,
        "max_tokens": args.max_tokens,
        "asked": [asdict(one) for one in found],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / BATCHES_FILE, record)
    print(write_table(args.output))


def measure_round(
    server: Server, questions: Sequence[str], args: argparse.Namespace, rng: random.Random
) -> tuple[list[Asked], int]:
    """Ask the first questions alone and beside a batch of others; return that, and how many lines were answered."""
    live, others = questions[: args.questions], questions[args.questions :]
    for question in live[:2]:  # whatever a server puts off until it is asked
        ask(server, question, args.max_tokens)
    alone = [ask(server, question, args.max_tokens) for question in live]
    client = OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=600)
    rows = []
    for row in range(args.lines):
        body = chat(server, others[row % len(others)], args.max_tokens) | {"temperature": 1, "seed": row}
        rows.append({"custom_id": f"{row}", "method": "POST", "url": _CHAT, "body": body})
    file = client.files.create(file=("lines", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while not (batch.request_counts and batch.request_counts.completed):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    beside = []
    for question in live:
        time.sleep(rng.uniform(0, _LONGEST_REST))
        beside.append(ask(server, question, args.max_tokens))
    client.batches.cancel(batch.id)
    while (batch := client.batches.retrieve(batch.id)).status != "cancelled":
        if batch.status == "completed":
            raise SystemExit("error: the batch was over before the live requests: give it more --lines")
        time.sleep(0.2)
    pairs = zip(alone, beside, strict=True)
    asked = [Asked(*one[:2], *other[:2], one[2] == other[2]) for one, other in pairs]
    assert batch.request_counts is not None
    return asked, batch.request_counts.completed


def chat(server: Server, question: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}


def ask(server: Server, question: str, max_tokens: int) -> tuple[float, float, str]:
    """Return the seconds until an answer's first text and its end, and it."""
    body = chat(server, question, max_tokens) | {"stream": True}
    begun, first, text = time.perf_counter(), None, ""
    with httpx2.stream("POST", server.address + _CHAT, json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"])
                if text and first is None:
                    first = time.perf_counter() - begun
    total = time.perf_counter() - begun
    return total if first is None else first, total, text


def ratio(asked: Sequence[Asked]) -> float:
    return median(one.total_beside / one.total for one in asked)


def write_table(folder: Path) -> str:
    """Write `batches.md` from `batches.json` in `folder`; return the table."""
    record = json.loads((folder / BATCHES_FILE).read_text(encoding="utf-8"))
    asked = [Asked(**one) for one in record["asked"]]
    rows = []
    for name, field in (("first text", "first"), ("whole answer", "total")):
        alone = [1000 * getattr(one, field) for one in asked]
        beside = [1000 * getattr(one, f"{field}_beside") for one in asked]
        rows.append(
            {
                "": name,
                "alone, median ms": f"{median(alone):.0f}",
                "beside, median ms": f"{median(beside):.0f}",
                "alone, 95 % ms": f"{quantiles(alone, n=20)[-1]:.0f}",
                "beside, 95 % ms": f"{quantiles(beside, n=20)[-1]:.0f}",
                "median ratio": f"{median(b / a for a, b in zip(alone, beside, strict=True)):.2f}",
            }
        )
    table = markdown_table(rows)
    same, about = sum(one.same for one in asked), record["environment"]
    page = (
        f"# Live requests beside a batch\n\nGreedy answers of up to {record['max_tokens']} tokens to {len(asked)} "
        f"GSM8K questions, one at a time, beside a batch of {record['lines']} lines, of which "
        f"{record['lines_answered']} were answered meanwhile; {same} of {len(asked)} answers are the same. "
        f"{machine(about)}. `{about['command']}`, commit {about['commit']}.\n\n{table}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
