"""Which tests notice a fault of one line.

    python -m studies.mutants --output studies/results/mutants

Each fault of `faults.yaml` is applied to a copy of the tree, and the tests of its room run until one fails: first those
of `make test`, then those of `make test-slow`. What the folder has by then is kept: a run that was interrupted goes on.
`--again` asks about all faults anew, and first runs the tests that noticed them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.mutants.faults import Verdict, import_slow, read_faults, verdicts

RECORD, TABLE = "mutants.json", "mutants.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Apply the faults, and write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD} and {TABLE}")
    parser.add_argument("--again", action="store_true", help="ask about the faults that the folder has, too")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / RECORD
    before = [Verdict(**one) for one in json.loads(file.read_text())["faults"]] if file.exists() else []
    kept = {} if args.again else {one.fault: one for one in before}
    faults = read_faults()
    import_slow()
    found = {fault.name: kept[fault.name] for fault in faults if fault.name in kept}
    for verdict in verdicts(Path.cwd(), [fault for fault in faults if fault.name not in kept], before):
        found[verdict.fault] = verdict
        print(verdict.suite or "NOBODY", verdict.fault, verdict.test or "", sep=" | ", file=sys.stderr, flush=True)
        _write(
            args.output,
            [asdict(one) for one in found.values()],
            shlex.join(["python", "-m", "studies.mutants", *given]),
        )


def _write(folder: Path, found: list[dict[str, Any]], command: str) -> None:
    record = {"command": command, "faults": found}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    counts = Counter(one["suite"] for one in found)
    lines = [
        "# Faults of one line, and who notices them",
        "",
        f"`{command}`. Of {len(found)} faults the tests of `make test` notice {counts['fast']}, those of "
        f"`make test-slow` {counts['slow']} others; {counts[None]} are noticed by none of their room.",
        "",
        "| fault | suite | test |",
        "|---|---|---|",
        *(f"| {one['fault']} | {one['suite'] or '**none**'} | {_name(one['test'])} |" for one in found),
    ]
    (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name(test: str | None) -> str:
    return "" if test is None else f"`{test.partition('[')[0].removeprefix('tests/')}`"


if __name__ == "__main__":
    main()
