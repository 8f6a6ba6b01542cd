"""The measurement as a Markdown page and a plot, as pure functions of its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.cells import Cell, Failure, standings
from benchmarks.peers.contenders import Contender
from drafter.evaluation.environment import machine
from drafter.evaluation.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"


def page(record: Mapping[str, Any], plot: str) -> str:
    """Return all tables as a page, with a plot's file."""
    about = record["environment"]
    cells = [Cell(**cell) for cell in record["cells"]]
    failures = [Failure(**one) for one in record["failures"]]
    counted = any(cell.steps is not None for cell in cells)
    told = " Tokens a step: those of a row in a step, where the engine tells." if counted else ""
    parts = [
        "# Beside other engines",
        f"{machine(about)}, {about['threads']} threads, {about['dtype']}; base of {about['base']['parameters']:,} "
        f"parameters; greedy, at most {record['max_new_tokens']} new tokens; medians of {record['rounds']} rounds, "
        f"ratios within a round. `{about['command']}`, commit {about['commit']}"
        f"{' with changes' if about['uncommitted_changes'] else ''}, {about['date']}.",
        "Prefills are part of the time. Each engine has the same weights, prompts as token ids and threads, and keeps "
        "nothing of a prompt from round to round. ÷ plain peer: relative to the fastest other engine that decodes "
        "plainly. ÷ best peer: to the fastest one, in any way. Same tokens: share of the tokens of this engine's plain "
        f"decoding.{told} Memory: the most that was resident while it decoded, weights included.",
        f"![tokens per second]({plot})",
    ]
    for context, batch, some in settings(cells):
        parts += [f"## {context.capitalize()} prompts, batch {batch}", table(some, contenders_of(record))]
    parts += ["## Versions", version_table(record["versions"])]
    if failures:
        parts += ["## Left out", "\n".join(f"- {one.contender}, batch {one.batch}: {one.reason}" for one in failures)]
    return "\n\n".join(parts) + "\n"


def contenders_of(record: Mapping[str, Any]) -> dict[str, Contender]:
    """Return the contenders of a record by name. Their environments are not in it."""
    found = [Contender(one["engine"], one["variant"], one["worker"]) for one in record["contenders"]]
    return {one.name: one for one in found}


def settings(cells: Sequence[Cell]) -> Iterator[tuple[str, int, list[Cell]]]:
    """Return contexts and batch sizes with their cells."""
    for context in dict.fromkeys(cell.context for cell in cells):
        for batch in sorted({cell.batch for cell in cells if cell.context == context}):
            yield context, batch, [cell for cell in cells if (cell.context, cell.batch) == (context, batch)]


def table(cells: Sequence[Cell], about: Mapping[str, Contender]) -> str:
    """Return the contenders of one context and batch size, in the order in which they were given."""
    found = standings(cells, about)
    told = any(one.per_step is not None for one in found.values())
    return markdown_table(
        [
            {
                "engine": name,
                "tokens/s": f"{found[name].rate:.0f}",
                **({"tokens a step": _ratio(found[name].per_step)} if told else {}),
                "÷ plain peer": _ratio(found[name].to_plain),
                "÷ best peer": _ratio(found[name].to_best),
                "same tokens": f"{100 * found[name].same:.1f} %",
                "memory, MiB": f"{found[name].peak_bytes / 2**20:.0f}",
            }
            for name in about
            if name in found
        ]
    )


def version_table(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the versions of each contender's packages."""
    return markdown_table(
        [
            {"engine": name, "versions": ", ".join(f"{package} {number}" for package, number in some.items())}
            for name, some in versions.items()
        ]
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot(cells: Sequence[Cell], about: Mapping[str, Contender]) -> Figure:
    """Plot tokens per second over batch sizes, a panel a context. An engine has a colour, a way to speculate dashes."""
    contexts = list(dict.fromkeys(cell.context for cell in cells))
    engines = list(dict.fromkeys(one.engine for one in about.values()))
    batches = sorted({cell.batch for cell in cells})
    from matplotlib.figure import Figure  # late: a machine that measures may have none
    from matplotlib.ticker import ScalarFormatter

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
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(ScalarFormatter())
        panel.grid(alpha=0.3)
        panel.label_outer()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure
