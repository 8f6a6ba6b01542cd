"""Programs of rows, for tests: each is `async def f(row, generate)`."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def note(row: dict[str, Any], what: str) -> None:
    """Write down what has happened to a row, for good."""
    with (Path(row["notes"]) / what).open("a") as file:
        file.write(f"{row['n']}\n")


def how_many(row: dict[str, Any], what: str) -> int:
    file = Path(row["notes"]) / what
    return len(file.read_text().split()) if file.exists() else 0


def begun(row: dict[str, Any]) -> int:
    """Return how often a row has begun."""
    return (Path(row["notes"]) / "begun").read_text().split().count(str(row["n"]))


async def ask(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
    """One call: a row without a program."""
    answer = await generate(row["prompt"])
    return {"answer": answer.text, "ids": answer.token_ids}


async def write_judge_mend(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
    """Three rounds of a chat that goes on, each from what came before. One row fails, and one blocks for a while."""
    note(row, "begun")
    # It blocks, and those beside it go on. After two deaths it would be alone, and rows that were in an engine at two
    # deaths wait until it has left: then there may be no others.
    while row["n"] == 3 and begun(row) == 1 and how_many(row, "ended") < 5:
        time.sleep(0.05)
    chat = [{"role": "user", "content": row["prompt"]}]
    said, cached = [], []
    for question in ("is it good", "mend it", ""):
        answer = await generate(chat, **({"temperature": 0.8} if not question else {}))
        said.append(answer.token_ids)
        cached.append(answer.num_cached_tokens)
        chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
    if row["n"] == 7:
        raise LookupError("seven is no number")
    note(row, "ended")
    return {"said": said, "cached": cached, "valid": row["n"] % 3 != 1}


async def best_of(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
    """Several answers at once, of which the longest counts, and a judge of few words."""
    answers = await asyncio.gather(*(generate(row["prompt"], temperature=1.0) for _ in range(3)))
    verdict = await generate("good?", structured_outputs={"choice": ["yes", "no"]}, seed=5)
    best = max(answers, key=lambda one: len(one.token_ids))
    mixed: Any = {"a": [1, "x"]} if row["n"] % 2 else row["n"]
    columns = {"ids": [one.token_ids for one in answers], "best": best.text, "verdict": verdict.parsed, "mixed": mixed}
    return columns | ({"seldom": True} if row["n"] == 5 else {})


async def mixed_fates(row: dict[str, Any], generate: Callable[..., Any]) -> Any:
    """What may become of programs, by their row."""
    match row["fate"]:
        case "blocks":
            time.sleep(3600)
        case "waits":
            await asyncio.sleep(3600)
        case "endless":
            while True:
                await generate(row["prompt"])
        case "no dict":
            return ["a", "list"]
        case "taken":
            return {"num_calls": 3}
        case "input":
            return {"prompt": "mine"}
        case "no json":
            return {"answer": threading.Lock()}
        case "valid":
            return {"valid": "yes"}
        case "refused":
            await generate(row["prompt"], temperature=-1)
        case "unknown":
            await generate(row["prompt"], heat=1)
        case "exits":
            sys.exit(3)
        case "mends":
            try:
                await generate("x " * 1000)
            except ValueError as error:
                return {"answer": f"mended: {error}"}
    return {"answer": (await generate(row["prompt"])).text}


def tell(path: str) -> None:
    """Write down a finished part beside the output; the first call fails."""
    told = Path(path).parent.parent.parent / "told"
    if not told.exists():
        told.touch()
        raise OSError("the line is busy")
    with told.open("a") as file:
        file.write(f"{path}\n")


def not_async(row: dict[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
    return row


async def one_argument(row: dict[str, Any]) -> dict[str, Any]:
    return row


number = 5
