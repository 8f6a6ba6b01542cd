"""What has been found, as one HTML page that needs nothing else: no script, no network, foreign text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from tqdm import tqdm

from drafter.statistics import (
    DecodeCounts,
    acceptance_by_depth,
    draft_acceptance_rate,
    mean_acceptance_length,
)
from pipeline.report.axes import Chart, rates_over_time, shares
from pipeline.report.cost import Cost
from pipeline.report.row_scan import Errors, Group, Rows
from pipeline.report.row_steps import Step

_MOST_GROUPS = 24
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Example:
    """A row with its steps.

    Args:
        row: All its columns.
        prompt: What the model was given.
        steps: How its text came about.
    """

    row: Mapping[str, Any]
    prompt: str
    steps: Sequence[Step]

    @property
    def beta(self) -> float:
        """β of this row."""
        return float(self.row["mean_acceptance_length"])


@dataclass(frozen=True)
class Comparison:
    """Another output beside this one.

    Args:
        name: Where it is.
        run: Its `run.json`.
        rows: Its rows.
        cost: What it cost, or why that is not known.
        same_tokens: Rows with the same tokens in both, of those compared.
        compared: Rows drawn from both and compared token by token.
        differences: What else is not the same, so that the costs are not of drafting alone.
    """

    name: str
    run: Mapping[str, Any]
    rows: Rows
    cost: Cost | str
    same_tokens: int
    compared: int
    differences: Sequence[str]


@dataclass(frozen=True)
class Report:
    """All that the page shows.

    Args:
        name: The output.
        run: Its `run.json`.
        status: Its `status.json`; empty if there is none.
        rows: Its rows.
        errors: Its errors.
        cost: What it cost, or why that is not known.
        against: Another output to compare with.
        category: What the groups of `rows` are, for people.
        examples: Some rows with their steps.
        not_shown: What cannot be shown of the examples, and why.
    """

    name: str
    run: Mapping[str, Any]
    status: Mapping[str, Any]
    rows: Rows
    errors: Errors
    cost: Cost | str
    against: Comparison | None
    category: str
    examples: Sequence[Example]
    not_shown: Sequence[str]

    @property
    def groups(self) -> list[tuple[str, Group]]:
        """The largest groups, and all others as one."""
        ordered = sorted(self.rows.groups.items(), key=lambda one: (-one[1].rows, one[0]))
        shown, rest = ordered[:_MOST_GROUPS], ordered[_MOST_GROUPS:]
        if rest:
            steps = sum(group.counts.num_decode_steps for _, group in rest)
            tokens = sum(group.counts.num_output_tokens for _, group in rest)
            counts = DecodeCounts(num_output_tokens=tokens, num_decode_steps=steps)
            shown.append((f"{len(rest):,} others", Group(sum(group.rows for _, group in rest), counts)))
        return shown

    @property
    def acceptance(self) -> list[Chart]:
        """Steps by how many draft tokens they accepted, and by how many at least."""
        histogram = self.rows.counts.acceptance_histogram
        steps = sum(histogram)
        if not steps:
            return []
        exactly = [(str(accepted), number / steps) for accepted, number in enumerate(histogram)]
        depths = [(str(depth), share) for depth, share in enumerate(acceptance_by_depth(self.rows.counts), start=1)]
        charts = [shares("Share of steps that accepted so many draft tokens", "draft tokens accepted", exactly)]
        if depths:
            charts.append(shares("By depth: share of steps that accepted at least so many", "depth", depths))
        return charts

    @property
    def over_time(self) -> Chart | None:
        """Tokens a second."""
        return rates_over_time(self.rows.by_second)


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"beta": mean_acceptance_length, "acceptance": draft_acceptance_rate, "cut": cut}
    environment.filters |= {"span": tqdm.format_interval, "count": "{:,}".format, "decimals": decimals}
    environment.filters["lines_shown"] = lines_shown
    return environment.get_template("page.html.jinja").render(report=report, rows=report.rows, Cost=Cost)


def cut(text: str) -> str:
    """The beginning of a long text."""
    left = len(text) - _LONGEST_TEXT
    return text if left <= 0 else f"{text[:_LONGEST_TEXT]}… ({left:,} more characters)"


def lines_shown(text: str) -> str:
    """A token's text where the ends of lines can be seen; the last one itself is left to what follows."""
    return text.replace("\n", "↵\n").removesuffix("\n")


def decimals(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
