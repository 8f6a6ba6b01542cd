"""Tables and plots of evaluations, as pure functions of their results, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.evaluation.environment import machine
from drafter.evaluation.results import PLAIN, STAGES, TRANSFORMERS, Arm, Cell, Figures, Results, Setting, figures
from drafter.statistics import mean_acceptance_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_FILE = "table.md"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""Palette of Okabe and Ito, which colour-blind readers can tell apart."""
_MARKERS = "osD^vPX*"
_LINES = {"exact": "-", "static": "--"}


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
            row[f"{name} β"] = "" if one.beta is None else f"{one.beta:.2f}"
            row[f"{name} γ"] = f"{one.gamma:.2f}"
            if one.relative_to_transformers is not None:
                row[f"{name} × generate"] = f"{one.relative_to_transformers:.2f}"
        made = sum(sum(map(sum, one.cell.tokens)) for one in cells)
        differing = [one.cell.differing_tokens for one in cells]
        known = [number for number in differing if number is not None]
        same_draws = len(known) == len(differing)
        rows.append(row | {"differing tokens": f"{sum(known)} of {made}" if same_draws else "draws of its own"})
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
        if times := _stage_times(cell):
            row, whole = _named(cell.arm), sum(times.values())
            row |= {f"{stage} ms": f"{time:.2f} ({time / whole:.0%})" for stage, time in times.items()}
            rows.append(row | {"all ms": f"{whole:.2f}"})
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
    made = {"gamma_by_batch": gamma_by_batch(found), "stage_times": stage_times(found)}
    if fixed:
        made |= {"beta_by_nodes": beta_by_nodes(fixed), "acceptance_by_depth": acceptance_by_depth(fixed)}
    return made


def acceptance_by_depth(found: Sequence[Figures]) -> Figure:
    """Plot the share of steps that accept at least 1, 2, … draft tokens, for the largest trees."""
    nodes = max(map(_nodes, found))
    found = [one for one in found if one.cell.arm.nodes == nodes]
    figure, panels = _panels(found, f"Acceptance by depth, {nodes} draft nodes")
    for name, panel in panels.items():
        for arm, (one,) in _lines(found, name).items():
            panel.plot(range(1, len(one.by_depth) + 1), one.by_depth, **_style(arm, found))
        panel.set(xlabel="depth (draft tokens)", ylabel="share of steps that accept as many", ylim=(0, 1))
        panel.set_xticks(range(1, max(len(one.by_depth) for one in found) + 1))
    return _finished(figure, panels.values())


def beta_by_nodes(found: Sequence[Figures]) -> Figure:
    """Plot β over fixed numbers of draft tokens."""
    figure, panels = _panels(found, "β by budget")
    for name, panel in panels.items():
        for arm, line in _lines(found, name).items():
            points = sorted((_nodes(one), one.beta or 0.0) for one in line)
            panel.plot(*zip(*points, strict=True), **_style(arm, found))
        _ticks(panel, map(_nodes, found))
        panel.set(xlabel="draft nodes per step", ylabel="β (tokens per forward of the target model)")
    return _finished(figure, panels.values())


def gamma_by_batch(found: Sequence[Figures]) -> Figure:
    """Plot γ over batch sizes, for adaptive trees if they were measured, otherwise for the smallest."""
    fixed = [one.cell.arm.nodes for one in found if isinstance(one.cell.arm.nodes, int)]
    adaptive = any(one.cell.arm.nodes == "auto" for one in found)
    nodes = "auto" if adaptive else min(fixed)
    drafted = [one for one in found if one.cell.arm.nodes == nodes]
    theirs = [one for one in found if one.cell.arm == TRANSFORMERS]
    figure, panels = _panels(found, f"γ by batch, {'adaptive number of' if adaptive else nodes} draft nodes")
    for name, panel in panels.items():
        panel.axhline(1, color="black", linewidth=1, label=PLAIN.method)
        for arm, line in _lines([*drafted, *theirs], name).items():
            points = sorted((one.cell.batch, one.gamma) for one in line)
            panel.plot(*zip(*points, strict=True), **_style(arm, drafted))
        _ticks(panel, (one.cell.batch for one in found))
        panel.set(xlabel="batch", ylabel="γ (speed, plain decoding = 1)")
        panel.set_ylim(0, 1.1 * max(one.gamma for one in [*drafted, *theirs]))
    return _finished(figure, panels.values())


def stage_times(found: Sequence[Figures]) -> Figure:
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


def _panels(found: Iterable[Figures], title: str) -> tuple[Figure, dict[str, Any]]:
    """Return a figure and its panels, one for each set of questions."""
    names = list(dict.fromkeys(one.cell.questions for one in found))
    figure, panels = new_figure((4.5 * len(names) + 2, 4), len(names), title)
    for panel, name in zip(panels, names, strict=True):
        panel.set_title(name)
        panel.grid(alpha=0.3)
    return figure, dict(zip(names, panels, strict=True))


def _nodes(one: Figures) -> int:
    """Return the fixed number of draft tokens of an arm."""
    assert isinstance(one.cell.arm.nodes, int)
    return one.cell.arm.nodes


def _lines(found: Iterable[Figures], questions: str) -> dict[Arm, list[Figures]]:
    """Return the figures of a set of questions by drafter and tree, keyed by the first arm of each."""
    lines: dict[tuple[str, str | None], list[Figures]] = {}
    for one in found:
        if one.cell.questions == questions:
            lines.setdefault((one.cell.arm.drafter, one.cell.arm.tree), []).append(one)
    return {line[0].cell.arm: line for line in lines.values()}


def _ticks(panel: Any, values: Iterable[int]) -> None:
    """Make the x axis logarithmic, with a tick at each value."""
    places = sorted(set(values))
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, list(map(str, places)))
    panel.minorticks_off()


def _style(arm: Arm, found: Iterable[Figures]) -> dict[str, Any]:
    """Return a drafter's colour and marker, and its tree's line style."""
    if arm == TRANSFORMERS:
        return {"color": "grey", "linestyle": ":", "marker": ".", "label": arm.method}
    place = list(dict.fromkeys(one.cell.arm.drafter for one in found)).index(arm.drafter)
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
