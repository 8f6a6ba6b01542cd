"""Figures of lenient verifiers, speed against utility: their settings, table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from drafter.acceptance.settings import VerifierSettings
from drafter.evaluation.tables import COLOURS, markdown_table, new_figure
from drafter.plugins import Sweep, registered
from drafter.statistics import DecodeCounts, PairedSums, kept_share, mean_acceptance_length

if TYPE_CHECKING:  # a GPU's bare machine measures without it
    from matplotlib.figure import Figure

EXACT = VerifierSettings()


def _sweep(settings: VerifierSettings) -> Sweep | None:
    return registered("sweeps").get(settings.name)


def _value(settings: VerifierSettings) -> float | None:
    """Return the value of the varied setting; None where it is not set, or there is none."""
    sweep = _sweep(settings)
    return None if sweep is None else settings.settings.get(sweep.setting)


def _with(settings: VerifierSettings, name: str, value: float | None) -> VerifierSettings:
    changed = settings.settings | {name: value}
    return replace(settings, settings={key: one for key, one in sorted(changed.items()) if one is not None})


def _with_value(settings: VerifierSettings, value: float | None) -> VerifierSettings:
    sweep = _sweep(settings)
    return settings if sweep is None else _with(settings, sweep.setting, value)


def leniency(settings: VerifierSettings) -> float:
    """Return a number that grows with the leniency of the varied setting; 0 where there is none or it is not set."""
    sweep, value = _sweep(settings), _value(settings)
    if sweep is None or value is None:
        return 0.0
    return value if sweep.values[-1] > sweep.values[0] else -value


def verifier_grid(settings: VerifierSettings) -> list[VerifierSettings]:
    """Return the settings to measure, from the strictest: the grid, or `settings` if nothing is left to be varied."""
    sweep = _sweep(settings)
    if sweep is None or _value(settings) is not None:
        return [settings]
    return [_with_value(settings, value) for value in sweep.values]


@dataclass(frozen=True)
class VerifierFigures:
    """Speed and utility of a verifier; answers and counts are those of the first round."""

    verifier: VerifierSettings
    token_ids: list[list[int]]
    texts: list[str]
    lenient_tokens: int  # those that the target model would not have chosen
    counts: DecodeCounts
    gamma: float  # speed relative to plain decoding
    utility: PairedSums = field(default_factory=PairedSums)  # over the requests: of exact decoding, and of this one

    def scored(self, exact: Sequence[float], scores: Sequence[float]) -> VerifierFigures:
        """Return the figures without the answers, but with the utility of each: of exact decoding, and of this one."""
        sums = PairedSums()
        for pair in zip(exact, scores, strict=True):
            sums.add(*pair)
        return replace(self, token_ids=[], texts=[], utility=sums)

    @property
    def beta(self) -> float:
        return mean_acceptance_length(self.counts)

    @property
    def kept(self) -> float | None:
        """Share of exact decoding's utility that is kept; None where that is 0."""
        return kept_share(self.utility.difference)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        difference = self.utility.difference
        counts = asdict(self.counts)
        del counts["per_step_accepted"]  # it is empty in sums
        return {
            "verifier": self.verifier.name,
            "settings": self.verifier.settings,
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
    """Return a verifier's name and numeric settings."""
    return ", ".join([settings.name, *_numbers(settings)])


def _numbers(settings: VerifierSettings) -> list[str]:
    return [f"{name} {value:g}" for name, value in settings.settings.items() if not isinstance(value, str)]


def in_order(found: Sequence[VerifierFigures]) -> list[VerifierFigures]:
    """Return figures by verifier, each from the strictest value of the varied setting."""
    return [one for line in _lines(found).values() for one in line]


def _lines(found: Sequence[VerifierFigures]) -> dict[VerifierSettings, list[VerifierFigures]]:
    """Return figures by all of their settings but the varied one, each line from the strictest."""
    lines: dict[VerifierSettings, list[VerifierFigures]] = {}
    for one in found:
        lines.setdefault(EXACT if one.verifier == EXACT else _with_value(one.verifier, None), []).append(one)
    return {common: sorted(line, key=lambda one: leniency(one.verifier)) for common, line in lines.items()}


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


_STYLES = ({"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "s"}, {"linestyle": ":", "marker": "^"})
"""Line styles of one verifier; a line may be a single point."""


def utility_plot(found: Sequence[VerifierFigures]) -> Figure:
    """Plot utility over β, a line for each verifier and look-ahead."""
    figure, (panel,) = new_figure((6.5, 4.5))
    lines = _lines(found)
    names = [common.name for common in lines]
    colours = dict(zip(registered("verifiers"), cycle(COLOURS)))
    for number, (common, line) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": "black", "marker": "*", "linestyle": "none"}
        if common != EXACT:
            style = {"color": colours[common.name], **_STYLES[names[:number].count(common.name) % len(_STYLES)]}
        points = [_place(one) for one in line]
        panel.plot(*zip(*points, strict=True), label=title_of(common), markersize=4, **style)
        for one, place in zip(line, points, strict=True):
            sweep, value = _sweep(one.verifier), _value(one.verifier)
            if sweep is not None and value is not None and value in sweep.values:
                panel.annotate(f"{value:g}", place, textcoords="offset points", xytext=(4, 4), fontsize=7)
    panel.set(xlabel="β (tokens per forward of the target model)", ylabel="utility")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure


def _place(one: VerifierFigures) -> tuple[float, float]:
    return one.beta, one.utility.difference.second
