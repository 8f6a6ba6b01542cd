"""Which tests notice a fault of one line.

    python -m studies.mutants --output studies/results/mutants

Each fault of `faults.yaml` is applied to a copy of the tree, and the tests of its room run until one fails: those of
`make test`, and at last those of `make test-slow` for the faults that live. What the folder has is kept: a run that was
interrupted goes on. `--again` asks about all faults anew, and first runs the tests that noticed them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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
    found = {} if args.again else {one.fault: one for one in before}
    import_slow()
    for suite in ("fast", "slow"):
        left = [fault for fault in read_faults() if _is_open(found.get(fault.name), suite)]
        for verdict in verdicts(Path.cwd(), left, suite, before):
            found[verdict.fault] = verdict
            print(suite, verdict.fault, verdict.test or "LIVES", sep=" | ", file=sys.stderr, flush=True)
            _write(args.output, list(found.values()), shlex.join(["python", "-m", "studies.mutants", *given]))


def _is_open(known: Verdict | None, suite: str) -> bool:
    return known is None or (known.test is None and (known.suite, suite) == ("fast", "slow"))


def _write(folder: Path, found: Sequence[Verdict], command: str) -> None:
    record = {"command": command, "faults": [asdict(one) for one in found]}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fast, slow = ([one for one in found if one.suite == suite and one.test is not None] for suite in ("fast", "slow"))
    lines = [
        "# Faults of one line, and who notices them",
        "",
        f"`{command}`. Of {len(found)} faults the tests of `make test` notice {len(fast)}, those of `make test-slow` "
        f"{len(slow)} others; {len(found) - len(fast) - len(slow)} are noticed by none that ran.",
        "",
        "| fault | suite | test |",
        "|---|---|---|",
        *(f"| {one.fault} | {one.suite} | {_name(one.test)} |" for one in found),
    ]
    (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name(test: str | None) -> str:
    return "**lives**" if test is None else f"`{test.partition('[')[0].removeprefix('tests/')}`"


if __name__ == "__main__":
    main()
