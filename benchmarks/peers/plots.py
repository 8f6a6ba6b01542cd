"""The measurement as a plot, as a pure function of its cells. Nothing is shown: no display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from benchmarks.peers.cells import Cell
from benchmarks.peers.contenders import Contender

_MARKERS = "osD^vPX*"


def plot(cells: Sequence[Cell], about: Mapping[str, Contender]) -> Figure:
    """Plot tokens per second over batch sizes, a panel a context. An engine has a colour, a way to speculate dashes."""
    contexts = list(dict.fromkeys(cell.context for cell in cells))
    engines = list(dict.fromkeys(one.engine for one in about.values()))
    batches = sorted({cell.batch for cell in cells})
    figure = Figure(figsize=(4.5 * len(contexts) + 3, 4.5), layout="constrained")
    panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for panel, context in zip(panels, contexts, strict=True):
        for place, (name, contender) in enumerate(about.items()):
            rates: dict[int, list[float]] = {}
            for cell in cells:
                if (cell.contender, cell.context) == (name, context):
                    rates.setdefault(cell.batch, []).append(cell.rate)
            points = sorted((batch, median(some)) for batch, some in rates.items())
            panel.plot(
                [batch for batch, _ in points],
                [rate for _, rate in points],
                color=f"C{engines.index(contender.engine)}",
                linestyle="-" if contender.is_plain else "--",
                marker=_MARKERS[place % len(_MARKERS)],
                label=name,
            )
        panel.set(title=f"{context} prompts", xlabel="batch", ylabel="tokens per second", yscale="log")
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, list(map(str, batches)))
        panel.grid(alpha=0.3)
        panel.label_outer()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure
