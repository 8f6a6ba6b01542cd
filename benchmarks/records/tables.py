"""The page of a measurement, as a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.records.measuring import FREE, PLAIN, Cell, Share
from drafter.evaluation.environment import machine
from drafter.evaluation.tables import markdown_table


def page(record: Mapping[str, Any]) -> str:
    """Return the tables of all batch sizes."""
    about, cells = record["environment"], [Cell(**cell) for cell in record["cells"]]
    shares = [Share(**share) for share in record["shares"]]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        "# Records",
        f"{machine(about)}, {about['threads']} threads, load of other processes at the start {record['load']:.1f}, "
        f"{about['dtype']}; target model of {about['base']['parameters']:,} parameters; greedy; records of four "
        f"schemas; medians of {record['rounds']} rounds, ratios within a round. `{about['command']}`, commit "
        f"{about['commit']}{' with changes' if about['uncommitted_changes'] else ''}, {about['date']}. {versions}.",
        "Prefills are part of the time, compiling the schemas is not. All ways under schemas of this engine gave the "
        "same tokens. *No schema* decodes as many tokens, whatever they are. γ is the speed relative to plain decoding "
        "under schemas. Another engine writes its records with other spaces and line breaks, so the records per second "
        "are what compares.",
    ]
    for batch in dict.fromkeys(cell.batch for cell in cells):
        some = [cell for cell in cells if cell.batch == batch]
        parts += [
            f"## Batch {batch}, {some[0].records} records",
            _speeds(some),
            "What the schemas take of the steps, prefills left out, in a run with clocks:",
            _shares([share for share in shares if share.batch == batch]),
        ]
    compiling = [{"": name, "ms": f"{1e3 * seconds:.1f}"} for name, seconds in record["compile_seconds"].items()]
    parts += ["## Compiling", markdown_table(compiling)]
    if record["left_out"]:
        parts += ["## Left out", "\n".join(f"- {one}" for one in record["left_out"])]
    return "\n\n".join(parts) + "\n"


def ratio(cells: Sequence[Cell], arm: str, to: str) -> float:
    """Return the median over the rounds of an arm's tokens per second ÷ those of another one."""
    of_round = {(cell.arm, cell.round): cell.rate for cell in cells}
    return median(rate / of_round[to, turn] for (one, turn), rate in of_round.items() if one == arm)


def _speeds(cells: Sequence[Cell]) -> str:
    rows = []
    for arm in sorted({cell.arm for cell in cells}, key=_place):
        some = [cell for cell in cells if cell.arm == arm]
        one, ours = some[0], some[0].steps > 0
        rows.append(
            {
                "": arm,
                "tokens/s": f"{median(cell.rate for cell in some):.0f}",
                "records/s": f"{median(cell.records / cell.seconds for cell in some):.2f}",
                "γ": f"{ratio(cells, arm, PLAIN.name):.2f}" if ours else "",
                "tokens a step": f"{one.tokens / one.steps:.2f}" if ours else "",
                "drafts accepted": f"{one.accepted / one.drafted:.0%}" if one.drafted else "",
                "forced": f"{one.forced / one.tokens:.0%}" if one.forced else "",
                "valid": "" if arm == FREE.name else f"{one.valid} of {one.records}",
            }
        )
    return markdown_table(rows)


def _shares(shares: Sequence[Share]) -> str:
    return markdown_table(
        [
            {
                "": one.arm,
                "trees": f"{one.trees / one.steps:.1%}",
                "masks": f"{one.masks / one.steps:.1%}",
                "choices": f"{one.choices / one.steps:.1%}",
                "output": f"{one.output / one.steps:.1%}",
                "together": f"{(one.trees + one.masks + one.choices + one.output) / one.steps:.1%}",
            }
            for one in shares
        ]
    )


def _place(arm: str) -> int:
    """Return where an arm stands in the tables: this engine's plain ways first, other engines last."""
    order = (FREE.name, PLAIN.name, "forced", "auto", "head")
    return order.index(arm) if arm in order else len(order)
