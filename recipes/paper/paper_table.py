"""The stage `table`: β and γ of every method on every set of questions, with the published figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from drafter.evaluation.results import PLAIN, Arm, Figures, Results, figures
from drafter.evaluation.tables import circumstances, markdown_table
from recipes.paper.published_figures import Published

_VANILLA = "vanilla"
_PUBLISHED_AT = (0.0, 1)
"""Temperature and batch of all published figures."""


def paper_page(results: Results, heads: Mapping[str, str], base: str, published: Sequence[Published]) -> str:
    """Return the table as a Markdown page.

    Args:
        results: What was measured.
        heads: Names of the methods by drafter, in the table's order.
        base: What the base is called.
        published: What others have published for it; figures that no measured setting stands beside are listed by
            themselves.
    """
    found = figures(results.cells)
    parts = [f"# {base}: β and γ", _heading(results)]
    settings = sorted({one.cell.setting[:2] for one in found})
    for temperature, batch in settings:
        here = [one for one in found if one.cell.setting[:2] == (temperature, batch)]
        beside = published if (temperature, batch) == _PUBLISHED_AT else []
        parts += [f"## Temperature {temperature:g}, batch {batch}", markdown_table(_rows(results, here, heads, beside))]
    sets = results.questions if _PUBLISHED_AT in settings else {}
    others = [one for one in published if one.questions not in sets]
    if others:
        parts += ["## Published for what was not measured here", markdown_table(_published_rows(others))]
    if published:
        sources = dict.fromkeys(f"- {one.name}: {one.source}" for one in published)
        parts += ["## Where the published figures come from", "\n".join(sources)]
    return "\n\n".join(parts) + "\n"


def _heading(results: Results) -> str:
    return (
        f"{circumstances(results)}; {results.environment['date']}.\n\n"
        "β: new tokens per forward of the base. γ: speed relative to plain decoding in the same engine and run. All "
        "heads learned from the same texts in the same number of steps, and draft the best tree that they can. "
        "Published figures are of other machines and implementations, at batch 1 and temperature 0, each with its own "
        "trees and training: β can be compared with care, γ can not."
    )


def _rows(
    results: Results, here: Sequence[Figures], heads: Mapping[str, str], published: Sequence[Published]
) -> list[dict[str, str]]:
    """Return the rows of one temperature and batch: ours in the order of `heads`, then published ones of no row."""
    sets = list(results.questions)
    by_arm: dict[Arm, dict[str, Figures]] = {}
    for one in here:
        by_arm.setdefault(one.cell.arm, {})[one.cell.questions] = one
    beside = [one for one in published if one.questions in sets]
    named: dict[tuple[str | None, str], dict[str, Published]] = {}
    for figure in beside:
        named.setdefault((figure.method, figure.name), {})[figure.questions] = figure
    rows = []
    for drafter in [PLAIN.drafter, *heads]:
        method = _VANILLA if drafter == PLAIN.drafter else heads[drafter]
        # The first published entry of a method stands beside our first row, each other one beside blank cells of ours.
        theirs = [(name, some) for (of, name), some in named.items() if of == method]
        ours = [(arm, cells) for arm, cells in by_arm.items() if arm.drafter == drafter]
        for place, (arm, cells) in enumerate(ours):
            name, some = theirs[0] if theirs and place == 0 else ("", {})
            rows.append(_row(method, _parameters(results, drafter), arm, cells, name, some, sets, bool(beside)))
        rows += [_row(method, "", None, {}, name, some, sets, True) for name, some in (theirs[1:] if ours else theirs)]
    of_no_row = [key for key in named if key[0] not in {_VANILLA, *heads.values()}]
    rows += [_row(key[1], "", None, {}, key[1], named[key], sets, True) for key in of_no_row]
    return rows


def _parameters(results: Results, drafter: str) -> str:
    return f"{results.heads[drafter]['parameters']:,}" if drafter in results.heads else ""


def _row(
    method: str,
    parameters: str,
    arm: Arm | None,
    ours: Mapping[str, Figures],
    name: str,
    theirs: Mapping[str, Published],
    sets: Sequence[str],
    with_published: bool,
) -> dict[str, str]:
    nodes = "" if arm is None or arm.nodes is None else str(arm.nodes)
    row = {"method": method, "parameters": parameters, "draft nodes": nodes}
    for one in sets:
        figure = ours.get(one)
        row[f"{one} β"] = "" if figure is None or figure.beta is None else f"{figure.beta:.2f}"
        row[f"{one} γ"] = "" if figure is None else f"{figure.gamma:.2f}"
    if with_published:
        row["published"] = name
        for one in sets:
            row[f"{one} published β"] = f"{theirs[one].beta:.2f}" if one in theirs else ""
            row[f"{one} published γ"] = f"{theirs[one].gamma:.2f}" if one in theirs else ""
    return row


def _published_rows(published: Sequence[Published]) -> list[dict[str, str]]:
    return [
        {"method": one.name, "questions": one.questions, "β": f"{one.beta:.2f}", "γ": f"{one.gamma:.2f}"}
        for one in published
    ]


def write_table(results: Path, heads: Mapping[str, str], base: str, published: Sequence[Published], file: Path) -> str:
    """Write the page of an evaluation. Return it.

    Args:
        results: Folder of the evaluation.
        heads: See `paper_page`.
        base: See `paper_page`.
        published: See `paper_page`.
        file: Where the page goes.
    """
    page = paper_page(Results.load(results), heads, base, published)
    file.write_text(page, encoding="utf-8")
    return page
