"""A comparison of stacks as a table and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafter.evaluation.results import write_json
from drafter.evaluation.stacks.stack_measurement import Comparison, stack_name

STACKS_FILE = "stacks.json"
TABLE_FILE = "stacks.md"


def stack_table(found: Comparison) -> str:
    """Return the stacks that were compared, the best first, and beside them what some took on held-out prompts."""
    taken = {one.levels: one for one in found.taken}
    lines = [
        "| drafter | expected ms a token | tokens a step | ms a step | measured ms a token | difference | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found.expected:
        measured = taken.get(one.levels)
        cells = [""] * 3
        if measured is not None:
            difference = measured.per_token / one.per_token - 1.0
            cells = [f"{1000 * measured.per_token:.2f}", f"{difference:+.0%}", f"{measured.tokens:.2f}"]
        numbers = [f"{1000 * one.per_token:.2f}", f"{one.tokens:.2f}", f"{1000 * one.seconds:.2f}", *cells]
        lines.append(f"| `{stack_name(one.levels)}` | {' | '.join(numbers)} |")
    return "\n".join(lines)


def acceptance_table(found: Comparison) -> str:
    """Return the share of each drafter's tokens that each model accepts."""
    levels = found.measured
    models = [place for place in range(len(levels.names)) if any(math.isfinite(row[place]) for row in levels.pricing)]
    heads = [f"`{levels.names[place]}`" for place in models]
    lines = [f"| drafted by | {' | '.join([*heads, 'the base'])} |", "|---" * (len(models) + 2) + "|"]
    for name, accepted, priced in zip(levels.names, levels.acceptance, levels.pricing, strict=True):
        cells = [f"{accepted[place]:.2f}" if math.isfinite(priced[place]) else "" for place in [*models, -1]]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_stacks(found: Comparison, environment: dict[str, Any], folder: Path) -> list[Path]:
    """Write `stacks.json` and `stacks.md` to `folder`; return the files."""
    values = asdict(found)
    pricing = values["measured"]["pricing"]
    values["measured"]["pricing"] = [[one if math.isfinite(one) else None for one in row] for row in pricing]
    write_json(
        folder / STACKS_FILE, {"environment": environment, "best": stack_name(found.expected[0].levels)} | values
    )
    (folder / TABLE_FILE).write_text(f"{stack_table(found)}\n\n{acceptance_table(found)}\n", encoding="utf-8")
    return [folder / STACKS_FILE, folder / TABLE_FILE]
