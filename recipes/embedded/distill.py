"""Generate the base's own continuations, which its draft heads learn from.

    python -m recipes.embedded.distill --base build/base --output build/distilled

There are three kinds of prompts, because a base answers prompts that it has memorised unlike other prompts:

- `distill`: GSM8K questions that the base was not trained on, answered greedily and by sampling;
- `base`: questions that it was trained on, answered by sampling;
- `invented`: any number of questions that the base makes up after a bare user header, answered greedily.

`validation` questions are answered greedily; they choose the checkpoint. Each part is written in chunks, JSONL files of
`{"tokens": [...], "prompt_length": n}`. Chunks that are complete are not generated again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from drafter.engine.config import EngineConfig
from drafter.engine.handle import Handle
from drafter.llm import SpeculativeLM
from drafter.requests import Request, SamplingParams
from drafter.text.chat import encode_chat
from recipes.embedded.gsm8k import read_split

CHUNK = 256
LONGEST_QUESTION = 192
LONGEST_ANSWER = 320


@dataclass(frozen=True)
class Job:
    """One prompt to continue, with its sampling temperature and seed."""

    prompt_ids: list[int]
    temperature: float
    seed: int


def submit(lm: SpeculativeLM, jobs: list[Job], limit: int) -> list[Handle]:
    """Submit every job, each for up to `limit` tokens."""
    return [
        lm.submit(
            Request(job.prompt_ids, SamplingParams(max_new_tokens=limit, temperature=job.temperature, seed=job.seed))
        )
        for job in jobs
    ]


def question_jobs(lm: SpeculativeLM, split: str, temperatures: list[float], seed: int) -> list[Job]:
    """Return every question of a split at each temperature, shuffled so that any beginning is a fair sample."""
    asked = ([{"role": "user", "content": problem.question}] for problem in read_split(split))
    prompts = [encode_chat(lm.tokenizer, messages) for messages in asked]
    jobs = [
        Job(prompt, temperature, seed + number * len(prompts) + index)
        for number, temperature in enumerate(temperatures)
        for index, prompt in enumerate(prompts)
    ]
    if split != "validation":
        random.Random(seed).shuffle(jobs)
    return jobs


def invented_jobs(lm: SpeculativeLM, seed: int) -> list[Job]:
    """Return a chunk of prompts that the base makes up: a sampled question, then the assistant's header."""
    user, assistant, end = lm.tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    jobs = [Job([user], 0.8, seed + index) for index in range(CHUNK)]
    questions = [handle.result().token_ids for handle in submit(lm, jobs, LONGEST_QUESTION)]
    # Only complete questions without a header inside are used.
    return [
        Job([user, *ids, assistant], 0.0, 0)
        for ids in questions
        if len(ids) > 8 and ids[-1] == end and user not in ids and assistant not in ids
    ]


def plan(lm: SpeculativeLM, args: argparse.Namespace) -> list[tuple[str, Callable[[], list[Job]]]]:
    """Return the chunks to generate: a file name and a function that makes its jobs. They are deterministic.

    Validation comes first, then the three other parts in turn, so that an interrupted run has some of each part.
    """
    parts: dict[str, list[Callable[[], list[Job]]]] = {}
    temperatures = {"validation": [0.0], "distill": args.distill_temperatures, "base": args.base_temperatures}
    for split, values in temperatures.items():
        jobs = question_jobs(lm, split, values, args.seed)
        parts[split] = [partial(list, jobs[i : i + CHUNK]) for i in range(0, len(jobs), CHUNK)]
    parts["invented"] = [partial(invented_jobs, lm, 1_000_000 + i) for i in range(0, args.invented, CHUNK)]
    named = {part: [(f"{part}-{i:04d}.jsonl", make) for i, make in enumerate(chunks)] for part, chunks in parts.items()}
    rest = zip_longest(named["distill"], named["invented"], named["base"])
    return named["validation"] + [chunk for turn in rest for chunk in turn if chunk is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--distill-temperatures", type=float, nargs="*", default=[0.0, 0.6, 0.8, 1.0])
    parser.add_argument("--base-temperatures", type=float, nargs="*", default=[0.8])
    parser.add_argument("--invented", type=int, default=12_800, help="questions to make up")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after about this long, at a chunk's end")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    started, total = time.monotonic(), 0
    config = EngineConfig(max_num_seqs=args.slots, max_model_len=640)
    with SpeculativeLM.from_pretrained(args.base, drafter="none", config=config) as lm:
        waiting: deque[tuple[Path, list[Job], list[Handle]]] = deque()

        def write_oldest() -> None:
            nonlocal total
            file, jobs, handles = waiting.popleft()
            answers = [handle.result().token_ids for handle in handles]
            lines = [
                json.dumps({"tokens": [*job.prompt_ids, *answer], "prompt_length": len(job.prompt_ids)})
                for job, answer in zip(jobs, answers, strict=True)
            ]
            temporary = file.with_suffix(".tmp")
            temporary.write_text("\n".join(lines) + "\n")
            temporary.replace(file)
            total += sum(map(len, answers))
            rate = total / (time.monotonic() - started)
            print(f"{file.name}  {total:,} answer tokens  {rate:,.0f} tokens/s", flush=True)

        for name, make_jobs in plan(lm, args):
            if time.monotonic() - started > args.minutes * 60:
                break
            file = args.output / name
            if not file.exists():
                jobs = make_jobs()
                waiting.append((file, jobs, submit(lm, jobs, LONGEST_ANSWER)))
            # The next chunk is queued before the last one is finished, so the slots stay full.
            if len(waiting) > 1:
                write_oldest()
        while waiting:
            write_oldest()


if __name__ == "__main__":
    main()
