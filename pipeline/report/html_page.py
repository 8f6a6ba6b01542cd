"""The report as one HTML page: it runs no script, needs no network, and escapes every text from the rows."""

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
    """All that the page shows.

    Args:
        name: Where the output is.
        run: Its `run.json`.
        status: Its `status.json`; empty if there is none.
        rows: What its rows say.
        errors: What its errors say.
        cost: What it cost, or why that is not known.
        against: Another output to compare with.
        category: What the rows are grouped by, in words.
        examples: Some rows with their steps.
        not_shown: What cannot be shown of the examples, and why.
        learning: What a head has learnt from the rows, or why nothing is known; None where no head was to.
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
        """What drafting was worth, and why; see `speculation_record`. None in outputs of earlier releases."""
        return self.status.get("speculation") or self.run.get("speculation")

    @property
    def old_choices(self) -> Sequence[Mapping[str, Any]]:
        """Which drafter was chosen at each batch size, in outputs of earlier releases."""
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
        """Chart of tokens a second."""
        return rates_over_time(self.rows.by_second)

    @property
    def learnt_over_time(self) -> list[Chart]:
        """Charts of acceptance length and tokens a second, with the versions of a head that learnt."""
        return learning_charts(self.learning) if isinstance(self.learning, LearningRecord) else []


def page_environment(*packages: str) -> Environment:
    """Return what renders pages: every text is escaped, and every package's templates may use this one's style."""
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
    """Return the page as HTML."""
    environment = page_environment()
    environment.filters |= {
        "acceptance_length": mean_acceptance_length,
        "acceptance": draft_acceptance_rate,
        "cut": cut,
    }
    environment.filters |= {"span": tqdm.format_interval, "decimals": decimals, "lines_shown": lines_shown}
    return environment.get_template("page.html.jinja").render(report=report, rows=report.rows, Cost=Cost)


def cut(text: str) -> str:
    """Return a text; of a long one, the beginning."""
    left = len(text) - _LONGEST_TEXT
    return text if left <= 0 else f"{text[:_LONGEST_TEXT]}… ({left:,} more characters)"


def lines_shown(text: str) -> str:
    """Return a token's text with a visible mark at each line end; the template breaks the line after the last one."""
    return text.replace("\n", "↵\n").removesuffix("\n")


def decimals(value: float) -> str:
    """Return a number with three significant digits; of a large one, all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
