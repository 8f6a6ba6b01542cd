"""Tables and plots of evaluations, as pure functions of their results, and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.evaluation.environment import machine
from drafter.evaluation.intervals import Interval, sign_test
from drafter.evaluation.results import PLAIN, STAGES, TRANSFORMERS, Arm, Cell, Figures, Results, Setting, figures
from drafter.statistics import mean_acceptance_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_FILE = "table.md"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""Palette of Okabe and Ito, which colour-blind readers can tell apart."""
_MARKERS = "osD^vPX*"
_LINES = {"exact": "-", "chain": "-.", "static": "--"}


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table. The first row's keys are its header."""
    lines: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def speed_table(found: Sequence[Figures]) -> str:
    """Return β, γ and the ratio to `transformers.generate`, if measured, by arm and set of questions."""
    rows = []
    for arm in dict.fromkeys(one.cell.arm for one in found):
        row, cells = _named(arm), [one for one in found if one.cell.arm == arm]
        for one in cells:
            name = one.cell.questions
            row[f"{name} β"] = "" if one.beta is None else with_interval(one.beta, one.beta_interval)
            row[f"{name} γ"] = with_interval(one.gamma, one.gamma_interval)
            faster, runs = one.faster
            row[f"{name} faster"] = "" if arm == PLAIN else f"{faster} of {runs}, p {sign_test(faster, runs):.2g}"
            if one.relative_to_transformers is not None:
                row[f"{name} × generate"] = f"{one.relative_to_transformers:.2f}"
        made = sum(sum(map(sum, one.cell.tokens)) for one in cells)
        differing = [one.cell.differing_tokens for one in cells]
        known = [number for number in differing if number is not None]
        same_draws = len(known) == len(differing)
        rows.append(row | {"differing tokens": f"{sum(known)} of {made}" if same_draws else "draws of its own"})
    return markdown_table(rows)


def with_interval(value: float, interval: Interval | None) -> str:
    """Return a figure with its interval, if there is one that says anything."""
    if interval is None or interval[0] == interval[1]:
        return f"{value:.2f}"
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


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
        if times := _stage_times(cell):
            whole = sum(times.values())
            shares = {f"{stage} ms": f"{time:.2f} ({time / whole:.0%})" for stage, time in times.items()}
            rows.append({**_named(cell.arm), **shares, "all ms": f"{whole:.2f}"})
    return markdown_table(rows)


def _named(arm: Arm) -> dict[str, object]:
    return {"method": arm.method, "tree": arm.tree or "", "draft nodes": "" if arm.nodes is None else arm.nodes}


def _stage_times(cell: Cell) -> dict[str, float]:
    """Return milliseconds per token by stage; empty if the decoder does not measure them."""
    sums = cell.stages
    return {} if sums is None else {stage: 1e3 * sums.seconds[stage] / sums.tokens for stage in STAGES}


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
    settings: dict[Setting, list[Cell]] = {}
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
            f"Milliseconds per token at temperature {temperature:g}, without prefills.",
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
    where = results.environment
    beside = TRANSFORMERS in {cell.arm for cell in results.cells}
    theirs = "× generate: speed relative to `transformers.generate`. " if beside else ""
    return (
        f"{circumstances(results)}.\n\n"
        f"`{where['command']}`, commit {where['commit']}{' with changes' if where['uncommitted_changes'] else ''}, "
        f"{where['date']}.\n\n"
        "β: new tokens per forward of the target model. γ: speed relative to plain decoding in the same engine and "
        "run. "
        "In brackets are 95 % intervals over prompts, by the bootstrap. Faster: runs in which it was faster than plain "
        "decoding, and how probable so uneven a count is if neither is faster (sign test). "
        f"{theirs}Differing tokens: tokens that are not plain decoding's at the same positions."
    )


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `table.md` and the plots to `folder`. Return their paths."""
    files = [folder / TABLE_FILE]
    files[0].write_text(page(results), encoding="utf-8")
    for name, figure in plots(results).items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


# Plots. No display is needed.


def plots(results: Results) -> dict[str, Figure]:
    """Return the plots that the results allow, by name, all at the lowest temperature."""
    found = figures(results.cells)
    coldest = min(one.cell.temperature for one in found)
    found = [one for one in found if one.cell.temperature == coldest]
    smallest = min(one.cell.batch for one in found)
    fixed = [one for one in found if one.cell.batch == smallest and isinstance(one.cell.arm.nodes, int)]
    made = {"gamma_by_batch": _gamma_by_batch(found), "stage_times": _stage_times_plot(found)}
    if fixed:
        largest = max(map(_nodes, fixed))
        made["beta_by_nodes"] = _curves(
            fixed,
            "β by budget",
            lambda one: [(_nodes(one), one.beta or 0.0)],
            xlabel="draft nodes per step",
            ylabel="β (tokens per forward of the target model)",
        )
        made["acceptance_by_depth"] = _curves(
            [one for one in fixed if one.cell.arm.nodes == largest],
            f"Acceptance by depth, {largest} draft nodes",
            lambda one: list(enumerate(one.by_depth, start=1)),
            xscale="linear",
            xlabel="depth (draft tokens)",
            ylabel="share of steps that accept as many",
            ylim=(0, 1),
        )
    return made


def _gamma_by_batch(found: Sequence[Figures]) -> Figure:
    """Plot γ over batch sizes, for adaptive trees if they were measured, otherwise for the smallest."""
    adaptive = any(one.cell.arm.nodes == "auto" for one in found)
    nodes = "auto" if adaptive else min(_nodes(one) for one in found if one.cell.arm.nodes is not None)
    drafted = [one for one in found if one.cell.arm.nodes == nodes]
    shown = [*drafted, *(one for one in found if one.cell.arm == TRANSFORMERS)]
    return _curves(
        shown,
        f"γ by batch, {'adaptive number of' if adaptive else nodes} draft nodes",
        lambda one: [(one.cell.batch, one.gamma)],
        plain=1.0,
        xlabel="batch",
        ylabel="γ (speed, plain decoding = 1)",
        ylim=(0, 1.1 * max(one.gamma for one in shown)),
    )


def _stage_times_plot(found: Sequence[Figures]) -> Figure:
    """Plot milliseconds per token by stage, for the first set of questions."""
    cells = [one.cell for one in found if one.cell.questions == found[0].cell.questions]
    times = {(cell.batch, cell.arm): _stage_times(cell) for cell in cells if cell.stages is not None}
    batches, arms = sorted({batch for batch, _ in times}), list(dict.fromkeys(arm for _, arm in times))
    size = 4.5 * len(batches) + 2, 0.32 * len(arms) + 1.8
    figure, panels = new_figure(size, len(batches), f"Where the time goes: {cells[0].questions}")
    for panel, batch in zip(panels, batches, strict=True):
        left = [0.0] * len(arms)
        for stage, colour in zip(STAGES, COLOURS, strict=False):
            widths = [times[batch, arm][stage] for arm in arms]
            panel.barh(range(len(arms)), widths, left=left, color=colour, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set(xlabel="ms per token", title=f"batch {batch}")
        panel.set_yticks(range(len(arms)), [_label(arm, arm.nodes) for arm in arms])
    panels[0].invert_yaxis()
    return _finished(figure, panels)


def new_figure(size: tuple[float, float], panels: int = 1, title: str | None = None) -> tuple[Figure, Sequence[Any]]:
    """Return a figure of `size` in inches and its panels, side by side with a common y axis."""
    from matplotlib.figure import Figure  # late: a machine that makes tables alone may have no matplotlib

    figure = Figure(figsize=size, layout="constrained")
    if title is not None:
        figure.suptitle(title)
    return figure, figure.subplots(1, panels, squeeze=False, sharey=True)[0]


def _curves(
    found: Sequence[Figures],
    title: str,
    points: Callable[[Figures], list[tuple[int, float]]],
    *,
    plain: float | None = None,
    xscale: str = "log",
    **axes: Any,
) -> Figure:
    """Plot the points of each drafter and tree as a line, in a panel for each set of questions.

    `plain` is plain decoding's value, a horizontal line; `axes` are labels and limits.
    """
    names = list(dict.fromkeys(one.cell.questions for one in found))
    drafters = list(dict.fromkeys(one.cell.arm.drafter for one in found if one.cell.arm != TRANSFORMERS))
    ticks = sorted({x for one in found for x, _ in points(one)})
    figure, panels = new_figure((4.5 * len(names) + 2, 4), len(names), title)
    for panel, name in zip(panels, names, strict=True):
        if plain is not None:
            panel.axhline(plain, color="black", linewidth=1, label=PLAIN.method)
        lines: dict[Arm, list[tuple[int, float]]] = {}
        for one in found:
            if one.cell.questions == name:
                lines.setdefault(replace(one.cell.arm, nodes=None), []).extend(points(one))
        for arm, line in lines.items():
            xs, ys = [x for x, _ in sorted(line)], [y for _, y in sorted(line)]
            panel.plot(xs, ys, **_style(arm, drafters))
        panel.set(title=name, **axes)
        panel.set_xscale(xscale, **({"base": 2} if xscale == "log" else {}))
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    return _finished(figure, panels)


def _nodes(one: Figures) -> int:
    """Return the fixed number of draft tokens of an arm."""
    assert isinstance(one.cell.arm.nodes, int)
    return one.cell.arm.nodes


def _style(arm: Arm, drafters: Sequence[str]) -> dict[str, Any]:
    """Return a drafter's colour and marker, and its tree's line style."""
    if arm == TRANSFORMERS:
        return {"color": "grey", "linestyle": ":", "marker": ".", "label": arm.method}
    place = drafters.index(arm.drafter)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _LINES[arm.tree or "exact"],
        "label": _label(arm),
    }


def _label(arm: Arm, *more: object) -> str:
    return ", ".join(str(part) for part in (arm.method, arm.tree, *more) if part is not None)


def _finished(figure: Figure, panels: Iterable[Any]) -> Figure:
    """Add one legend for all panels, and keep only the outer axis labels."""
    handles: dict[str, Any] = {}
    for panel in panels:
        panel.label_outer()
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    return figure
