"""Write into README what the demo prints, what drafts gain, and how fast engines are, from committed results.

make demo && python -m benchmarks.readme --demo build/demo    # take over a run of the demo first
python -m benchmarks.readme                                   # write README again
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import never_slower
from benchmarks.peers.cells import Cell, standings
from benchmarks.peers.tables import contenders_of
from drafter.evaluation.results import Results, figures
from drafter.evaluation.tables import markdown_table

_ROOT = Path(__file__).parents[1]
_RESULTS = Path(__file__).parent / "results"
README = _ROOT / "README.md"
DEMO, PEERS = _RESULTS / "demo", _RESULTS / "peers-smollm2-epyc"
NEVER_SLOWER, TEXTS = _RESULTS / "never-slower-smollm2", _RESULTS / "drafters-smollm2"
_FILES = ("screen.txt", "summary.json")
_ENGINES = {
    "this engine, none": "this engine, plain decoding",
    "this engine, smollm2-135m-instruct": "this engine, the head that ships",
    "this engine, auto": "this engine, `auto` (the default)",
    "OpenVINO GenAI, plain": "OpenVINO GenAI",
    "OpenVINO GenAI, prompt lookup": "OpenVINO GenAI, its own speculation",
}
"""Rows of the table of speed: contenders by what README calls them."""
_TEXTS = {
    "arithmetic": ("questions of arithmetic", "questions"),
    "chat": ("chat", "chat"),
    "records": ("records of one kind", "records"),
    "code": ("edits of code", "edits"),
}
"""Rows of the table of gains: a kind of text in the one record, what README calls it, and its name in the other."""
_BATCHES = (1, 4, 16)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take over a run of the demo, if one is given, and write README's blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="folder of a run of the demo")
    demo = parser.parse_args(arguments).demo
    if demo is not None:
        DEMO.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(demo / name, DEMO / name)
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """Return README's text with its blocks made of the committed results."""
    screen = (DEMO / _FILES[0]).read_text(encoding="utf-8").strip("\n")
    record = json.loads((PEERS / "peers.json").read_text(encoding="utf-8"))
    first, *_, last = screen.split("\n\n> ")
    shown = f"{first}\n\n> {last}".partition("\n\nrows ")[0]  # one answer of several, and no paths: README is short
    blocks = {"demo": f"````\n{shown}\n````", "gains": gains_table(), "speed": speed_table(record)}
    for name, block in blocks.items():
        mark = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert mark.search(text), f"README has no block {name}"
        text = mark.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)  # type: ignore[misc]
    return text


def speed_table(record: dict[str, Any]) -> str:
    """Return tokens/s of the engines by batch size, of a record of `benchmarks.peers`."""
    cells = [Cell(**cell) for cell in record["cells"] if cell["context"] == "short"]
    about = contenders_of(record)
    rows: dict[str, dict[str, str]] = {name: {"tokens/s": label} for name, label in _ENGINES.items() if name in about}
    for batch in sorted({cell.batch for cell in cells}):
        found = standings([cell for cell in cells if cell.batch == batch], about)
        for name, row in rows.items():
            row[f"batch {batch}"] = f"{found[name].rate:.0f}" if name in found else "–"
    return markdown_table(list(rows.values()))


def gains_table() -> str:
    """Return γ by kind of text and rows at a time: of `auto` with the head that ships, and of `memory` alone."""
    record = json.loads((NEVER_SLOWER / "never-slower.json").read_text(encoding="utf-8"))
    cells = [never_slower.Cell(**cell) for cell in record["cells"]]
    texts = {
        one.cell.setting: one.gamma for one in figures(Results.load(TEXTS).cells) if one.cell.arm.drafter == "memory"
    }
    rows = []
    for kind, (label, questions) in _TEXTS.items():
        row = {"text": label}
        for batch in _BATCHES:
            found = never_slower.ratios([cell for cell in cells if (cell.kind, cell.batch) == (kind, batch)])
            row[f"`auto`, with a head: {_rows(batch)}"] = f"{found['auto']:.2f}"
        row |= {f"`memory`, without: {_rows(batch)}": f"{texts[0.0, batch, questions]:.2f}" for batch in _BATCHES}
        rows.append(row)
    return markdown_table(rows)


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"


if __name__ == "__main__":
    main()
