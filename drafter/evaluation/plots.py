"""Plots of an evaluation, as pure functions of its results. No display is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from drafter.evaluation.measurement import STAGES
from drafter.evaluation.plan import PLAIN, TRANSFORMERS, Arm
from drafter.evaluation.results import Figures, Results, figures

# The colours of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
_MARKERS = "osD^vPX*"
_LINES = {"exact": "-", "static": "--"}


def plots(results: Results) -> dict[str, Figure]:
    """Return the plots that the results allow, by name, all at the lowest temperature."""
    found = figures(results.cells)
    coldest = min(one.cell.temperature for one in found)
    found = [one for one in found if one.cell.temperature == coldest]
    smallest = min(one.cell.batch for one in found)
    drafted = [one for one in found if one.cell.arm.nodes is not None]
    alone = [one for one in drafted if one.cell.batch == smallest]
    fixed = [one for one in alone if one.cell.arm.nodes != "auto"]
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
        for one in found:
            if one.cell.questions == name:
                panel.plot(range(1, len(one.by_depth) + 1), one.by_depth, **_style(one.cell.arm, found))
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
    drafted = [one for one in found if one.cell.arm.nodes is not None]
    adaptive = any(one.cell.arm.nodes == "auto" for one in drafted)
    nodes = "auto" if adaptive else min(map(_nodes, drafted))
    drafted = [one for one in drafted if one.cell.arm.nodes == nodes]
    theirs = [one for one in found if one.cell.arm == TRANSFORMERS]
    figure, panels = _panels(found, f"γ by batch, {'adaptive number of' if adaptive else nodes} draft nodes")
    for name, panel in panels.items():
        panel.axhline(1, color="black", linewidth=1, label=PLAIN.method)
        for arm, line in (_lines(drafted, name) | _lines(theirs, name)).items():
            points = sorted((one.cell.batch, one.gamma) for one in line)
            style = {"color": "grey", "linestyle": ":", "marker": ".", "label": arm.method}
            panel.plot(*zip(*points, strict=True), **(style if arm == TRANSFORMERS else _style(arm, drafted)))
        _ticks(panel, (one.cell.batch for one in found))
        panel.set(xlabel="batch", ylabel="γ (speed, plain decoding = 1)")
        panel.set_ylim(0, 1.1 * max(one.gamma for one in [*drafted, *theirs]))
    return _finished(figure, panels.values())


def stage_times(found: Sequence[Figures]) -> Figure:
    """Plot milliseconds per token by stage, for the first set of questions."""
    cells = [one.cell for one in found if one.cell.questions == found[0].cell.questions]
    times = {(cell.batch, cell.arm): cell.stages for cell in cells if cell.stages is not None}
    batches, arms = sorted({batch for batch, _ in times}), list(dict.fromkeys(arm for _, arm in times))
    figure = Figure(figsize=(4.5 * len(batches) + 2, 0.32 * len(arms) + 1.8), layout="constrained")
    figure.suptitle(f"Where the time goes: {cells[0].questions}")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for panel, batch in zip(panels, batches, strict=True):
        left = [0.0] * len(arms)
        for stage, colour in zip(STAGES, _COLOURS, strict=False):
            widths = [1e3 * times[batch, arm].seconds[stage] / times[batch, arm].tokens for arm in arms]
            panel.barh(range(len(arms)), widths, left=left, color=colour, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set(xlabel="ms per token", title=f"batch {batch}")
        panel.set_yticks(range(len(arms)), [_label(arm, arm.nodes) for arm in arms])
    panels[0].invert_yaxis()
    return _finished(figure, panels)


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


def _panels(found: Iterable[Figures], title: str) -> tuple[Figure, dict[str, Any]]:
    """Return a figure and its panels, one for each set of questions."""
    names = list(dict.fromkeys(one.cell.questions for one in found))
    figure = Figure(figsize=(4.5 * len(names) + 2, 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, names, strict=True):
        panel.set_title(name)
        panel.grid(alpha=0.3)
    return figure, dict(zip(names, panels, strict=True))


def _ticks(panel: Any, values: Iterable[int]) -> None:
    """Make the x axis logarithmic, with a tick at each value."""
    places = sorted(set(values))
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, list(map(str, places)))
    panel.minorticks_off()


def _style(arm: Arm, found: Iterable[Figures]) -> dict[str, Any]:
    """Return a drafter's colour and marker, and its tree's line style."""
    place = list(dict.fromkeys(one.cell.arm.drafter for one in found)).index(arm.drafter)
    return {
        "color": _COLOURS[place % len(_COLOURS)],
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
