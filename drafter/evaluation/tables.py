"""Report of an evaluation: tables as pure functions of its results, and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from drafter.evaluation.environment import machine
from drafter.evaluation.measurement import STAGES
from drafter.evaluation.plan import TRANSFORMERS, Arm
from drafter.evaluation.results import Cell, Figures, Results, figures
from drafter.statistics import mean_acceptance_length


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table. The first row's keys are its header."""
    lines: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def speed_table(found: Sequence[Figures]) -> str:
    """Return β, γ and the ratio to `transformers.generate`, if measured, by arm and set of questions."""
    rows = []
    for arm in dict.fromkeys(one.cell.arm for one in found):
        row, made, differing = _named(arm), 0, 0
        comparable = True
        for one in found:
            if one.cell.arm != arm:
                continue
            name = one.cell.questions
            row[f"{name} β"] = "" if one.beta is None else f"{one.beta:.2f}"
            row[f"{name} γ"] = f"{one.gamma:.2f}"
            if one.relative_to_transformers is not None:
                row[f"{name} × generate"] = f"{one.relative_to_transformers:.2f}"
            made += sum(map(sum, one.cell.tokens))
            comparable = comparable and one.cell.differing_tokens is not None
            differing += one.cell.differing_tokens or 0
        rows.append(row | {"differing tokens": f"{differing} of {made}" if comparable else "draws of its own"})
    return markdown_table(rows)


def category_table(cells: Sequence[Cell]) -> str:
    """Return β of each arm by category, of the cells of one setting."""
    return markdown_table(
        [
            _named(cell.arm)
            | {f"{name} β": f"{mean_acceptance_length(counts):.2f}" for name, counts in sorted(cell.counts.items())}
            for cell in cells
            if cell.counts
        ]
    )


def stage_table(cells: Sequence[Cell]) -> str:
    """Return milliseconds per token by stage, of the cells of one setting."""
    rows = []
    for cell in cells:
        if cell.stages is not None:
            times = [1e3 * cell.stages.seconds[stage] / cell.stages.tokens for stage in STAGES]
            row = _named(cell.arm)
            for stage, time in zip(STAGES, times, strict=True):
                row[f"{stage} ms"] = f"{time:.2f} ({time / sum(times):.0%})"
            rows.append(row | {"all ms": f"{sum(times):.2f}"})
    return markdown_table(rows)


def _named(arm: Arm) -> dict[str, object]:
    return {"method": arm.method, "tree": arm.tree or "", "draft nodes": "" if arm.nodes is None else arm.nodes}


def speed_tables(results: Results) -> str:
    """Return a table with a heading for each temperature and batch size."""
    found = figures(results.cells)
    parts = []
    for temperature, batch in sorted({one.cell.setting[:2] for one in found}):
        parts.append(f"## Temperature {temperature:g}, batch {batch}")
        parts.append(speed_table([one for one in found if one.cell.setting[:2] == (temperature, batch)]))
    return "\n\n".join(parts)


def page(results: Results) -> str:
    """Return all tables as a Markdown page."""
    parts = ["# Evaluation", _heading(results), speed_tables(results)]
    settings: dict[tuple[float, int, str], list[Cell]] = {}
    for cell in results.cells:
        settings.setdefault(cell.setting, []).append(cell)
    temperature, smallest, first = min(settings, key=lambda setting: setting[:2])
    for name, questions in results.questions.items():
        if questions["categories"]:
            parts += [
                f"## β by category: {name}",
                f"Temperature {temperature:g}, batch {smallest}.",
                category_table(settings[temperature, smallest, name]),
            ]
    for batch in sorted({setting[1] for setting in settings}):
        parts += [
            f"## Where the time goes: {first}, batch {batch}",
            f"Milliseconds per token at temperature {temperature:g}, without prefills, from a separate pass.",
            stage_table(settings[temperature, batch, first]),
        ]
    if results.skipped:
        left_out = [f"- {one.drafter}, {one.tree} tree: {one.reason}" for one in results.skipped]
        parts += ["## Left out", "\n".join(left_out)]
    return "\n\n".join(parts) + "\n"


def circumstances(results: Results) -> str:
    """Return machine, model and questions of the results as a clause without a full stop."""
    where, plan = results.environment, results.plan
    asked = ", ".join(f"{one['prompts']} prompts of {one['file']} ({name})" for name, one in results.questions.items())
    return (
        f"{machine(where)}, {where['threads']} threads, {where['dtype']}; model of {where['base']['parameters']:,} "
        f"parameters; {asked}; at most {plan['max_new_tokens']} new tokens; medians of {plan['rounds']} rounds"
    )


def _heading(results: Results) -> str:
    """Return the measurement's circumstances and the meaning of the figures."""
    where = results.environment
    beside = TRANSFORMERS in {cell.arm for cell in results.cells}
    theirs = "× generate: speed relative to `transformers.generate`. " if beside else ""
    return (
        f"{circumstances(results)}.\n\n"
        f"`{where['command']}`, commit {where['commit']}{' with changes' if where['uncommitted_changes'] else ''}, "
        f"{where['date']}.\n\n"
        "β: new tokens per forward of the target model. γ: speed relative to plain decoding in the same engine and "
        "run. "
        f"{theirs}Differing tokens: tokens that are not plain decoding's at the same positions."
    )


TABLE_FILE = "table.md"


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `table.md` and the plots to `folder`. Return their paths."""
    from drafter.evaluation.plots import plots  # late: who makes tables alone may have no matplotlib

    files = [folder / TABLE_FILE]
    files[0].write_text(page(results), encoding="utf-8")
    for name, figure in plots(results).items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files
