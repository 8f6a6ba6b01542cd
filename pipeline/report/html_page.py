"""Renders the report as one HTML page without scripts and network access; texts from the rows are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from tqdm import tqdm

from drafter.statistics import DecodeCounts, acceptance_by_depth, draft_acceptance_rate, mean_acceptance_length
from pipeline.learning.record import LearningRecord
from pipeline.report.charts import Chart, learning_charts, rates_over_time, shares
from pipeline.report.output_files import Comparison, Cost
from pipeline.report.rows import Category, ErrorSummary, Example, RowSummary

_MOST_GROUPS = 24
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Report:
    """Data of the page.

    Args:
        name: Folder or URI of the output.
        status: Its `status.json`; empty if there is none.
        cost: Its cost, or the reason why it is unknown.
        category: Meaning of the groups, in words.
        not_shown: Sentences on what cannot be shown of the examples.
        learning: The learner's record, or the reason why there is none; None where learning was off.
    """

    name: str
    run: Mapping[str, Any]
    status: Mapping[str, Any]
    rows: RowSummary
    errors: ErrorSummary
    cost: Cost | str
    against: Comparison | None
    category: str
    examples: Sequence[Example]
    not_shown: Sequence[str]
    learning: LearningRecord | str | None = None

    @property
    def groups(self) -> list[tuple[str, Category]]:
        """The largest categories by name, and all others together."""
        ordered = sorted(self.rows.groups.items(), key=lambda one: (-one[1].rows, one[0]))
        shown, rest = ordered[:_MOST_GROUPS], ordered[_MOST_GROUPS:]
        if rest:
            steps = sum(group.counts.num_decode_steps for _, group in rest)
            tokens = sum(group.counts.num_output_tokens for _, group in rest)
            counts = DecodeCounts(num_output_tokens=tokens, num_decode_steps=steps)
            shown.append((f"{len(rest):,} others", Category(sum(group.rows for _, group in rest), counts)))
        return shown

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        """Measured benefit of drafting; see `speculation_record`. None in outputs of earlier releases."""
        return self.status.get("speculation") or self.run.get("speculation")

    @property
    def old_choices(self) -> Sequence[Mapping[str, Any]]:
        """Drafter chosen at each batch size, in outputs of earlier releases."""
        return self.status.get("drafting") or self.run.get("drafting") or ()

    @property
    def acceptance(self) -> list[Chart]:
        """Charts of the share of steps that accepted exactly, and at least, so many draft tokens."""
        histogram = self.rows.counts.acceptance_histogram
        steps = sum(histogram)
        if not self.rows.counts.num_draft_tokens:
            return []
        exactly = [(str(accepted), number / steps) for accepted, number in enumerate(histogram)]
        depths = [(str(depth), share) for depth, share in enumerate(acceptance_by_depth(self.rows.counts), start=1)]
        charts = [shares("Share of steps that accepted so many draft tokens", "draft tokens accepted", exactly)]
        if depths:
            charts.append(shares("By depth: share of steps that accepted at least so many", "depth", depths))
        return charts

    @property
    def over_time(self) -> Chart | None:
        return rates_over_time(self.rows.by_second)

    @property
    def learnt_over_time(self) -> list[Chart]:
        """Charts of acceptance length and tokens a second, with the head's versions marked."""
        return learning_charts(self.learning) if isinstance(self.learning, LearningRecord) else []


def page_environment(*packages: str) -> Environment:
    """Return a Jinja environment that escapes all texts and adds this package's style to those of `packages`."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in (*packages, "pipeline.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = "{:,}".format
    return environment


def render(report: Report) -> str:
    environment = page_environment()
    environment.filters |= {
        "acceptance_length": mean_acceptance_length,
        "acceptance": draft_acceptance_rate,
        "cut": cut,
    }
    environment.filters |= {"span": tqdm.format_interval, "decimals": decimals, "lines_shown": lines_shown}
    return environment.get_template("page.html.jinja").render(report=report, rows=report.rows, Cost=Cost)


def cut(text: str) -> str:
    """Clip a long text, and say how much is missing."""
    left = len(text) - _LONGEST_TEXT
    return text if left <= 0 else f"{text[:_LONGEST_TEXT]}… ({left:,} more characters)"


def lines_shown(text: str) -> str:
    """Mark each line end of a token's text visibly; the template breaks the line after the last one."""
    return text.replace("\n", "↵\n").removesuffix("\n")


def decimals(value: float) -> str:
    """Format a number with three significant digits; from 100 on, with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
