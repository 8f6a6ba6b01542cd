"""Turns of a chat, and rows that come and go, by an earlier tree of this repository and by this one in turn.

    git worktree add build/before COMMIT
    python -m studies.come_and_go --before build/before --output studies/results/come-and-go-smollm2

A chat's next turn begins with all that was said before. The rows are questions of GSM8K, three times as many as are
decoded together, of 16 to 96 new tokens; the head that ships drafts. Each tree runs in processes of its own, which say
how many prompt tokens were read, and seconds, also of processor time: other work on the machine lengthens that little.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafter.drafters.registry import load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.environment import machine, surroundings
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer

RECORD_FILE, TABLE_FILE = "come_and_go.json", "come_and_go.md"
_ANSWER, _NODES = 40, 3


def run(model: str, head: str, slots: Sequence[int], turns: int, kept: int | None) -> dict[str, Any]:
    """Measure in this process, with or without ended rows kept; an earlier tree has no such setting."""
    base, tokenizer = load_base(model), load_tokenizer(model)

    def engine(rows: int, drafter: str, longest: int | None = None) -> Engine:
        more: dict[str, Any] = {"kept_rows": kept} if "kept_rows" in {one.name for one in fields(EngineConfig)} else {}
        config = EngineConfig(rows, longest, num_draft_tokens=_NODES, max_queue=1024, **more)
        return Engine(base, load_drafter(drafter, base, _NODES), tokenizer, config)

    found: dict[str, Any] = {"chat": _chat(engine(1, "none"), tokenizer, turns)}
    for rows in slots:
        for way, drafter in (("plain", "none"), ("drafts", head)):
            found[f"{way}, {rows} rows"] = _rows(engine(rows, drafter, 512), tokenizer, 3 * rows)
    return found


def _chat(engine: Engine, tokenizer: Any, count: int) -> list[dict[str, float]]:
    """Return what each turn took to its first token."""
    lines = Path("data/chat-prompts/questions.jsonl").read_text(encoding="utf-8").splitlines()
    said = [turn for line in lines for turn in json.loads(line)["turns"]][:count]
    messages, turns = list[dict[str, str]](), []
    for text in said:
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        read, start, spent = engine.state().prefilled_tokens, time.perf_counter(), time.process_time()
        handle = engine.submit(Request(ids, SamplingParams(_ANSWER)), stream=True)
        while not any(one.output for one in engine.scheduler.active):
            engine.step()
        seconds, processor = time.perf_counter() - start, time.process_time() - spent
        turns.append({
            "prompt": len(ids),
            "read": engine.state().prefilled_tokens - read,
            "seconds": seconds,
            "processor": processor,
        })  # fmt: skip
        while not engine.idle:
            engine.step()
        messages.append({"role": "assistant", "content": handle.result(0).text})
    return turns


def _rows(engine: Engine, tokenizer: Any, count: int) -> dict[str, Any]:
    lines, drawn = Path("data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[:count], random.Random(0)
    asked = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    requests = [
        Request(
            tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False),
            SamplingParams(drawn.randrange(16, 97), ignore_eos=True),
        )
        for one in asked
    ]
    handles = [engine.submit(one) for one in requests]
    start, spent = time.perf_counter(), time.process_time()
    while not engine.idle:
        engine.step()
    seconds, processor = time.perf_counter() - start, time.process_time() - spent
    outputs = [one.result(0).token_ids for one in handles]
    digest = hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16]
    return {"tokens": sum(map(len, outputs)), "seconds": seconds, "processor": processor, "digest": digest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--before", type=Path, help="folder of the earlier tree")
    parser.add_argument("--model", default=str(Path("~/.cache/drafter/smollm2-135m-instruct").expanduser()))
    parser.add_argument("--head", default="drafter/embedded/other_heads/smollm2-135m-instruct")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=10, help="of the chat (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--kept", type=int, default=None, help="rows that are kept; by default the engine's default")
    parser.add_argument("--worker", action="store_true", help="measure once, here, and print what was found")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if args.worker:
        print(json.dumps(run(args.model, args.head, args.slots, args.turns, args.kept)))
        return
    here = Path.cwd()
    arms = {"before": (args.before, []), "without kept rows": (here, ["--kept", "0"]), "now": (here, [])}
    same = ["--model", args.model, "--head", args.head, "--slots", *map(str, args.slots), "--turns", str(args.turns)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, (tree, more) in arms.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", *same, *more]
            here_first = {**os.environ, "PYTHONPATH": str(tree.resolve())}
            done = subprocess.run(command, cwd=tree, env=here_first, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    record = {
        "environment": surroundings(torch.device("cpu"), shlex.join(["python", "-m", "studies.come_and_go", *given])),
        "load": os.getloadavg(),
        "runs": found,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    (args.output / TABLE_FILE).write_text(page(record), encoding="utf-8")


def page(record: dict[str, Any]) -> str:
    """Return the tables with their heading: medians of the rounds."""
    about, runs = record["environment"], record["runs"]
    last = {name: [one["chat"][-1] for one in of_arm] for name, of_arm in runs.items()}
    chat = [
        {
            "": name,
            "prompt": int(turns[0]["prompt"]),
            "read": int(turns[0]["read"]),
            "processor seconds to the first token": f"{median(one['processor'] for one in turns):.2f}",
            "seconds": f"{median(one['seconds'] for one in turns):.2f}",
        }
        for name, turns in last.items()
    ]
    cells = []
    for cell in [name for name in next(iter(runs.values()))[0] if name != "chat"]:
        of_arms = {name: [one[cell] for one in of_arm] for name, of_arm in runs.items()}
        rates = {
            by: {name: median(one["tokens"] / one[by] for one in found) for name, found in of_arms.items()}
            for by in ("seconds", "processor")
        }
        row: dict[str, object] = {"": cell}
        row |= {f"tokens/s, {name}": f"{rate:.0f}" for name, rate in rates["seconds"].items()}
        row["now ÷ before"] = f"{rates['seconds']['now'] / rates['seconds']['before']:.2f}"
        row["by processor seconds"] = f"{rates['processor']['now'] / rates['processor']['before']:.2f}"
        row["the same tokens"] = len({one["digest"] for found in of_arms.values() for one in found}) == 1
        cells.append(row)
    return "\n\n".join([
        "# Turns of a chat, and rows that come and go",
        f"{machine(about)}, {about['threads']} threads, load {record['load'][0]:.1f} at the end; medians of "
        f"{len(runs['now'])} runs of each in turn. `{about['command']}`, commit {about['commit']}.",
        f"The last of a chat's {len(runs['now'][0]['chat'])} turns:",
        markdown_table(chat),
        "Rows that come and go:",
        markdown_table(cells) + "\n",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
