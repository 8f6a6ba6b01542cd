"""Utility against speed: how much of exact decoding's utility each verifier keeps, and which keeps enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from drafter.evaluation.leniency.setting_grid import EXACT, grid_values, leniency, varied_value, with_value
from drafter.evaluation.leniency.verifier_runs import VerifierRun
from drafter.evaluation.tables import markdown_table
from drafter.statistics import DecodeCounts, PairedSums, kept_share
from drafter.verifiers.verifier_settings import VerifierSettings

_COLOURS = {"fly": "#0072B2", "pad": "#D55E00", "typical": "#009E73"}
"""Of the colours of Okabe and Ito, which colour-blind readers can tell apart."""
_STYLES = ({"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "s"}, {"linestyle": ":", "marker": "^"})
"""Of the lines of one verifier; a line may be a single point."""


@dataclass(frozen=True)
class VerifierFigures:
    """What a verifier gains and costs.

    Args:
        verifier: Its settings.
        utility: Sums over the requests: of exact decoding, and of this verifier.
        beta: New tokens per base forward.
        gamma: Speed relative to plain decoding.
        lenient_tokens: Tokens that the base would not have chosen.
        counts: Raw speculation counts.
    """

    verifier: VerifierSettings
    utility: PairedSums
    beta: float
    gamma: float
    lenient_tokens: int
    counts: DecodeCounts

    @classmethod
    def of(cls, run: VerifierRun, exact: Sequence[float], scores: Sequence[float]) -> VerifierFigures:
        """Return the figures of a run.

        Args:
            run: The run.
            exact: What each answer of exact decoding is worth.
            scores: What each answer of this run is worth.
        """
        sums = PairedSums()
        for pair in zip(exact, scores, strict=True):
            sums.add(*pair)
        return cls(run.verifier, sums, run.beta, run.gamma, run.lenient_tokens, run.counts)

    @property
    def kept(self) -> float | None:
        """Share of exact decoding's utility that is kept; None where that is 0."""
        return kept_share(self.utility.difference)

    def keeps(self, share: float) -> bool:
        """Whether this share of exact decoding's utility is kept."""
        return self.kept is not None and self.kept >= share

    def as_dict(self) -> dict[str, Any]:
        """Return all as plain values, for JSON."""
        difference = self.utility.difference
        counts = asdict(self.counts)
        del counts["per_step_accepted"]  # it is empty in sums
        return {
            "verifier": self.verifier.name,
            "settings": self.verifier.given,
            "requests": self.utility.pairs,
            "utility": difference.second,
            "exact_utility": difference.first,
            "difference": difference.mean,
            "margin": difference.margin,
            "kept": self.kept,
            "beta": self.beta,
            "gamma": self.gamma,
            "lenient_tokens": self.lenient_tokens,
            "counts": counts,
        }


def title_of(settings: VerifierSettings) -> str:
    """Name a verifier and those of its settings that are numbers."""
    return ", ".join([settings.name, *_numbers(settings)])


def _numbers(settings: VerifierSettings) -> list[str]:
    return [f"{name} {value:g}" for name, value in settings.given.items() if not isinstance(value, str)]


def fastest_that_keeps(found: Sequence[VerifierFigures], keep: float) -> list[VerifierFigures]:
    """Return of each lenient verifier the setting of largest β that keeps enough; those that have none are left out.

    Args:
        found: The figures of all settings.
        keep: Share of exact decoding's utility.
    """
    best: dict[str, VerifierFigures] = {}
    for one in found:
        name = one.verifier.name
        if one.verifier == EXACT or not one.keeps(keep):
            continue
        if name not in best or one.beta > best[name].beta:
            best[name] = one
    return list(best.values())


def in_order(found: Sequence[VerifierFigures]) -> list[VerifierFigures]:
    """Return figures verifier by verifier, and of each from the strictest value of what is varied."""
    return [one for line in _lines(found).values() for one in line]


def utility_table(found: Sequence[VerifierFigures]) -> str:
    """Return β, γ and utility of all settings as a Markdown table."""
    rows = []
    for one in found:
        difference = one.utility.difference
        margin = "" if difference.margin is None else f" ± {difference.margin:.4f}"
        rows.append(
            {
                "verifier": one.verifier.name,
                "settings": ", ".join(_numbers(one.verifier)),
                "β": f"{one.beta:.2f}",
                "γ": f"{one.gamma:.2f}",
                "utility": f"{difference.second:.4f}",
                "beside exact": "" if one.verifier == EXACT else f"{difference.mean:+.4f}{margin}",
                "kept": "" if one.kept is None else f"{one.kept:.1%}",
                "lenient tokens": f"{one.lenient_tokens} of {one.counts.num_output_tokens}",
            }
        )
    return markdown_table(rows)


def utility_plot(found: Sequence[VerifierFigures], kept: Sequence[VerifierFigures] = ()) -> Figure:
    """Plot utility over β: a line for each verifier, and for each window of `fly`.

    Args:
        found: The figures of all settings.
        kept: Those of them that are pointed out.
    """
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    panel = figure.subplots()
    lines = _lines(found)
    names = [common.name for common in lines]
    for number, (common, line) in enumerate(lines.items()):
        name = common.name
        points = [_place(one) for one in line]
        style: dict[str, Any] = {"color": "black", "marker": "*", "linestyle": "none"}
        if name in _COLOURS:
            style = {"color": _COLOURS[name], **_STYLES[names[:number].count(name) % len(_STYLES)]}
        panel.plot(*zip(*points, strict=True), label=title_of(common), markersize=4, **style)
        for one, place in zip(line, points, strict=True):
            if one.verifier != EXACT and (varied_value(one.verifier) in grid_values(name) or one in kept):
                text = f"{varied_value(one.verifier):g}"
                below = one in kept  # where its neighbours' numbers are not
                panel.annotate(text, place, textcoords="offset points", xytext=(4, -13 if below else 4), fontsize=7)
    for one in kept:
        ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "linestyle": "none"}
        panel.plot(*_place(one), color=_COLOURS[one.verifier.name], **ring)
    panel.set(xlabel="β (tokens per base forward)", ylabel="utility")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure


def _lines(found: Sequence[VerifierFigures]) -> dict[VerifierSettings, list[VerifierFigures]]:
    """Figures by all of their settings but the varied one."""
    lines: dict[VerifierSettings, list[VerifierFigures]] = {}
    for one in found:
        lines.setdefault(EXACT if one.verifier == EXACT else with_value(one.verifier, None), []).append(one)
    return {
        common: line if common == EXACT else sorted(line, key=lambda one: leniency(one.verifier))
        for common, line in lines.items()
    }


def _place(one: VerifierFigures) -> tuple[float, float]:
    return one.beta, one.utility.difference.second
