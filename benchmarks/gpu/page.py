"""`gpu.md`: the tables of all stages, from their cells' files alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import capture, choices, costs, decoding, families, identity, operators, profile, whole_steps
from benchmarks.gpu.cells import Stage
from drafter.evaluation.environment import machine
from drafter.evaluation.tables import markdown_table

PAGE_FILE = "gpu.md"
STAGES: tuple[Stage, ...] = (
    families.STAGE,
    capture.STAGE,
    identity.STAGE,
    operators.STAGE,
    choices.STAGE,
    costs.STAGE,
    whole_steps.STAGE,
    decoding.STAGE,
    profile.STAGE,
)
"""All stages, in the order of the day."""


def write_page(folder: Path) -> str:
    """Write `gpu.md` from the stages' files in `folder`. Return it."""
    parts = ["# The first day on a GPU"]
    for stage in STAGES:
        file = folder / f"{stage.name}.jsonl"
        if file.is_file():
            parts += _section(stage, file.read_bytes().splitlines(keepends=True))
    page = "\n\n".join(parts) + "\n"
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")
    return page


def _section(stage: Stage, lines: Iterable[bytes]) -> list[str]:
    """A stage's table for each machine and version it was measured with, of each cell the newest line."""
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    parts = [f"## {stage.name.capitalize()}", stage.about]
    for identity_ in dict.fromkeys(json.dumps(line["identity"], sort_keys=True) for line in whole):
        same = [line for line in whole if json.dumps(line["identity"], sort_keys=True) == identity_]
        newest = {json.dumps(line["cell"], sort_keys=True): line for line in same}.values()
        parts.append(_heading(same[-1]))
        if good := [stage.row(line["cell"], line["values"]) for line in newest if "values" in line]:
            parts.append(markdown_table(good))
        if bad := [line for line in newest if "error" in line]:
            parts.append("\n".join(f"- **no result**: {json.dumps(line['cell'])}: {line['error']}" for line in bad))
    return parts


def _heading(line: dict[str, Any]) -> str:
    about, plan = line["environment"], line["identity"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    changes = " with changes" if about["uncommitted_changes"] else ""
    return (
        f"{machine(about)}, {about['threads']} threads, {versions}; model {Path(plan['model']).name}, drafter "
        f"{plan['drafter']}{', tiny' if plan['tiny'] else ''}. `{about['command']}`, commit {about['commit']}"
        f"{changes}, {about['date']}."
    )
