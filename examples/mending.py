"""Programs of rows: write, judge and mend. In this folder: `drafter generate --rollout mending:write_judge_mend …`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUNDS = 3
VERDICT = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "flaw": {"type": "string", "maxLength": 80}},
    "required": ["good", "flaw"],
}


async def write_judge_mend(row: Mapping[str, Any], generate: Any) -> dict[str, Any]:
    """Ask for a text, and for a better one until the model itself finds no flaw; such a row is valid."""
    chat = [{"role": "user", "content": row["prompt"]}]
    rounds = 0
    while rounds < ROUNDS:
        rounds += 1
        draft = await generate(chat, max_new_tokens=60)
        chat.append({"role": "assistant", "content": draft.text})
        judge = [*chat, {"role": "user", "content": "Is that right? Name the worst flaw."}]
        verdict = (await generate(judge, structured_outputs={"json": VERDICT})).parsed
        if verdict is not None and verdict["good"]:
            break
        flaw = "it is vague" if verdict is None else verdict["flaw"]
        chat.append({"role": "user", "content": f"Write it again. The flaw: {flaw}"})
    return {"answer": draft.text, "rounds": rounds, "valid": verdict is not None and verdict["good"]}


def finished(path: str) -> None:
    """Say where finished rows are: `--on_part mending:finished`."""
    print(f"rows are in {path}")
