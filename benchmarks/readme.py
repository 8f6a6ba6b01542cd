"""Write into README what the demo prints, how fast engines are, and trees beside chains, from committed results.

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

from benchmarks.peers.cells import Cell, standings
from benchmarks.peers.tables import contenders_of
from benchmarks.trees import comparisons
from drafter.evaluation.results import Results
from drafter.evaluation.tables import markdown_table

_ROOT = Path(__file__).parents[1]
_RESULTS = Path(__file__).parent / "results"
README = _ROOT / "README.md"
DEMO, PEERS, TREES = _RESULTS / "demo", _RESULTS / "peers-smollm2-epyc", _RESULTS / "trees-smollm2"
_FILES = ("screen.txt", "summary.json")
_ENGINES = {
    "this engine, none": "this engine, plain decoding",
    "this engine, smollm2-135m-instruct": "this engine, the head that ships",
    "this engine, auto": "this engine, `auto` (the default)",
    "OpenVINO GenAI, plain": "OpenVINO GenAI",
    "OpenVINO GenAI, prompt lookup": "OpenVINO GenAI, its own speculation",
}
"""Rows of the table of speed: contenders by what README calls them."""


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
    blocks = {"demo": f"````\n{shown}\n````", "speed": speed_table(record), "trees": trees_table(Results.load(TREES))}
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


def trees_table(results: Results) -> str:
    """Return trees beside chains of one row, greedy, over all kinds of text."""
    rows = []
    for one in comparisons(results.cells)[0.0, 1]:
        if one.kind == "all":
            row = one.row
            shown = {
                "draft tokens, at most": row["draft tokens"],
                "acceptance length: chain": row["acceptance length, chain"],
                "tree": row["tree "],
                "tokens/s: none": row["tokens/s, none"],
                "chain": row["chain"],
                "tree ": row["tree  "],
                "tree ÷ chain": row["tree ÷ chain"],
                "runs in which it is faster": row["tree faster"],
            }
            rows.append(shown)
    return markdown_table(rows)


if __name__ == "__main__":
    main()
