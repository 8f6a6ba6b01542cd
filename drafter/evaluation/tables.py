"""Tables of evaluations, as pure functions of their results, and their file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafter.evaluation.environment import machine
from drafter.evaluation.intervals import Interval, sign_test
from drafter.evaluation.results import PLAIN, STAGES, Arm, Cell, Figures, Results, Setting, figures
from drafter.statistics import acceptance_by_depth, mean_acceptance_length, rejection_warning, total

TABLE_FILE, LATEX_FILE = "table.md", "table.tex"
_POSITIONS = 8
_MOST_SETS = 4  # with more sets of questions a line of `speed_table` would be too long to be read
_LATEX = {letter: f"\\{letter}" for letter in "%_&#${}"} | {
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "≥": r"$\geq$",
    "÷": r"$\div$",
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table. The first row's keys are its header."""
    lines: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def latex_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a table of LaTeX's package `booktabs`. The first row's keys are its header."""
    head, *lines = [list(map(_latex, map(str, cells))) for cells in (list(rows[0]), *(row.values() for row in rows))]
    body = "\n".join(f"{' & '.join(cells)} \\\\" for cells in lines)
    columns = "l" * len(head)
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{' & '.join(head)} \\\\\n\\midrule\n{body}\n\\bottomrule\n"
        "\\end{tabular}\n"
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def acceptance_rows(found: Sequence[Figures]) -> list[dict[str, object]]:
    """Return a row for each arm at each setting: its speed, β, and how many draft tokens steps accepted.

    The column `≥ n` is the share of decode steps that accepted at least n draft tokens, so β is about one more than the
    sum of these shares of all n.
    """
    rows = []
    for one in found:
        cell = one.cell
        shares = acceptance_by_depth(total(cell.counts.values()))[:_POSITIONS]
        shares += [0.0] * (_POSITIONS - len(shares))
        rows.append(
            {"questions": cell.questions, "T": f"{cell.temperature:g}", "batch": cell.batch}
            | _named(cell.arm)
            | {"β": "" if one.beta is None else with_interval(one.beta, one.beta_interval)}
            | {f"≥ {place}": f"{share:.2f}" for place, share in enumerate(shares, start=1)}
            | {"tokens/s": f"{one.rate:,.0f}", "γ": with_interval(one.gamma, one.gamma_interval)}
            | {"differing": "" if cell.differing_tokens is None else cell.differing_tokens}
        )
    return rows


def tree_ratios(found: Sequence[Figures]) -> list[dict[str, object]]:
    """Return by how much more a drafter's exact tree brings than its chain of as many draft tokens, at each setting."""
    chains = {
        (one.cell.setting, replace(one.cell.arm, tree="exact")): one for one in found if one.cell.arm.tree == "chain"
    }
    return [
        {"questions": one.cell.questions, "T": f"{one.cell.temperature:g}", "batch": one.cell.batch}
        | {name: value for name, value in _named(one.cell.arm).items() if name != "tree"}
        | {"β, tree ÷ chain": f"{one.beta / chain.beta:.2f}", "γ, tree ÷ chain": f"{one.gamma / chain.gamma:.2f}"}
        for one in found
        if (chain := chains.get((one.cell.setting, one.cell.arm))) and one.beta and chain.beta
    ]


def speed_table(found: Sequence[Figures]) -> str:
    """Return β and γ by arm and set of questions."""
    rows = []
    for arm in dict.fromkeys(one.cell.arm for one in found):
        row, cells = _named(arm), [one for one in found if one.cell.arm == arm]
        for one in cells:
            name = one.cell.questions
            row[f"{name} β"] = "" if one.beta is None else with_interval(one.beta, one.beta_interval)
            row[f"{name} γ"] = with_interval(one.gamma, one.gamma_interval)
            faster, runs = one.faster
            row[f"{name} faster"] = "" if arm == PLAIN else f"{faster} of {runs}, p {sign_test(faster, runs):.2g}"
        made = sum(sum(map(sum, one.cell.tokens)) for one in cells)
        known = [one.cell.differing_tokens for one in cells if one.cell.differing_tokens is not None]
        differing = f"{sum(known)} of {made}" if len(known) == len(cells) else "draws of its own"
        rows.append(row | {"differing tokens": differing})
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
    found = figures(results.cells)
    if len(results.questions) > _MOST_SETS:
        return markdown_table(acceptance_rows(found))
    parts = []
    for temperature, batch in sorted({one.cell.setting[:2] for one in found}):
        parts.append(f"## Temperature {temperature:g}, batch {batch}")
        parts.append(speed_table([one for one in found if one.cell.setting[:2] == (temperature, batch)]))
    return "\n\n".join(parts)


def page(results: Results) -> str:
    parts, found = ["# Evaluation", _heading(results), *remarks(results), speed_tables(results)], figures(results.cells)
    if len(results.questions) <= _MOST_SETS:
        parts += ["## Accepted draft tokens", markdown_table(acceptance_rows(found))]
    if ratios := tree_ratios(found):
        parts += ["## Tree ÷ chain", markdown_table(ratios)]
    settings: dict[Setting, list[Cell]] = {}
    for cell in results.cells:
        settings.setdefault(cell.setting, []).append(cell)
    temperature, smallest, first = min(settings, key=lambda setting: setting[:2])
    for name, questions in results.questions.items():
        if len(questions["categories"]) > 1:
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


def remarks(results: Results) -> list[str]:
    """Say what the heads learned from, that acceptance was forced, and which drafters are hardly accepted."""
    said = []
    for name, head in results.heads.items():
        if learned := _learned(head["training"]):
            said.append(f"{Arm(name, 'exact').method}: {head['parameters']:,} parameters, learned from {learned}.")
    if (forced := results.plan.get("acceptance")) is not None:
        said.append(
            f"**Acceptance is FORCED to β {forced:g}**: trees have so many right tokens, at the drafters' own cost, so "
            "the figures are the system's."
        )
    for cell in results.cells:
        if warning := rejection_warning(total(cell.counts.values())):
            said.append(f"**{cell.arm.method} on {cell.questions}: {warning}**")
    return list(dict.fromkeys(said))


def _learned(training: Mapping[str, Any]) -> str:
    """Say what a head learned from, and before that, if its training began with a trained head; empty if unknown."""
    data, history = training.get("data") or {}, training.get("history") or [{}]
    parts = [data] if "targets" in data else [part for part in data.values() if isinstance(part, Mapping)]
    texts, targets = (sum(part.get(what, 0) for part in parts) for what in ("texts", "targets"))
    if not targets:
        return ""
    steps, seconds = history[-1].get("step", 0), history[-1].get("seconds")
    took = "" if seconds is None else f", in {seconds / 3600:.1f} hours"
    before = _learned(training.get("start") or {})
    return f"{texts:,} texts with {targets:,} targets, {steps:,} steps{took}{before and f', after {before}'}"


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
    return (
        f"{circumstances(results)}.\n\n"
        f"`{where['command']}`, commit {where['commit']}{' with changes' if where['uncommitted_changes'] else ''}, "
        f"{where['date']}.\n\n"
        "β: new tokens per forward of the target model. γ: speed relative to plain decoding in the same engine and "
        "run. "
        "≥ n: share of decode steps that accepted at least n draft tokens. "
        "In brackets are 95 % intervals over questions, by the bootstrap. Faster: questions (at larger batches rounds) "
        "in which it was faster than plain decoding, and how probable so uneven a count is if neither is faster (sign "
        "test). "
        "Differing tokens: tokens that are not plain decoding's at the same positions."
    )


def write_report(results: Results, folder: Path) -> Path:
    """Write the page, and the table of accepted draft tokens in LaTeX."""
    (folder / LATEX_FILE).write_text(latex_table(acceptance_rows(figures(results.cells))), encoding="utf-8")
    file = folder / TABLE_FILE
    file.write_text(page(results), encoding="utf-8")
    return file
