"""Figures of lenient verifiers, speed against utility: their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from drafter.acceptance.settings import VerifierSettings
from drafter.evaluation.tables import markdown_table
from drafter.statistics import DecodeCounts, PairedSums, kept_share, mean_acceptance_length

EXACT = VerifierSettings()


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
