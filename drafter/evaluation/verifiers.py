"""Measures lenient verifiers: speed against utility over a grid of settings, and a search between its points."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure

from drafter.acceptance.settings import VerifierSettings, make_verifier
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.tables import markdown_table
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts, PairedSums, kept_share, mean_acceptance_length, per_second, speedup, total
from drafter.target.model import BaseModel

EXACT = VerifierSettings()
_GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {
    "fly": ("theta", (1.05, 1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)),
    "pad": ("sigma", (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)),
    "typical": ("delta", (0.9, 0.5, 0.3, 0.09, 0.03, 0.01)),
}
"""The varied setting of each, from the strictest value: the published one, and some on both sides of it."""


def varied(name: str) -> str:
    """Return the name of a lenient verifier's varied setting."""
    return _GRIDS[name][0]


def grid_values(name: str) -> tuple[float, ...]:
    """Return the grid of the varied setting, from the strictest to the most lenient."""
    return _GRIDS[name][1]


def varied_value(settings: VerifierSettings) -> float:
    """Return the value of a lenient verifier's varied setting, which must be set."""
    return float(getattr(settings, varied(settings.name)))


def with_value(settings: VerifierSettings, value: float | None) -> VerifierSettings:
    """Return the settings with another value of the varied one."""
    return replace(settings, **{varied(settings.name): value})  # type: ignore[arg-type]


def leniency(settings: VerifierSettings) -> float:
    """Return a number that grows with the leniency of the varied setting, which must be set."""
    strictest, *_, most_lenient = grid_values(settings.name)
    value = varied_value(settings)
    return value if most_lenient > strictest else -value


def verifier_grid(settings: VerifierSettings) -> list[VerifierSettings]:
    """Return the settings to measure, from the strictest: the grid, or `settings` if its varied value is set."""
    if getattr(settings, varied(settings.name)) is not None:
        return [settings]
    return [with_value(settings, value) for value in grid_values(settings.name)]


_WARM_UP = 2


@dataclass(frozen=True)
class VerifierRun:
    """Results of decoding the requests under one verifier.

    Args:
        token_ids: New tokens of each request, in the first round.
        lenient_tokens: Tokens that the target model would not have chosen, in the first round.
        counts: Speculation counts of the first round.
        rates: Tokens per second, by round.
        plain_rates: The same of plain decoding in the same rounds.
    """

    verifier: VerifierSettings
    token_ids: list[list[int]]
    texts: list[str]
    lenient_tokens: int
    counts: DecodeCounts
    rates: list[float] = field(default_factory=list)
    plain_rates: list[float] = field(default_factory=list)

    @property
    def beta(self) -> float:
        """β: new tokens per target forward."""
        return mean_acceptance_length(self.counts)

    @property
    def gamma(self) -> float:
        return speedup(self.rates, self.plain_rates)


class VerifierTrials:
    """Decodes the same requests under several verifiers, each beside plain decoding in the same round.

    Each verifier has its own engine, because an engine learns what pays under its verifier, reads the hidden states
    that it needs, and on a GPU replays graphs recorded with it. So two engines exist at a time.

    Args:
        drafter: Makes a new drafter.
        config: The engines' sizes; `max_queue` is raised to hold all requests.
        rounds: Number of timed rounds.

    Attributes:
        depth: Most draft tokens of a path.
    """

    def __init__(
        self,
        base: BaseModel,
        tokenizer: Any,
        drafter: Callable[[], Drafter],
        requests: Sequence[Request],
        config: EngineConfig,
        rounds: int,
    ) -> None:
        config = replace(config, max_queue=max(config.max_queue, len(requests)))
        self._base, self._tokenizer, self._drafter = base, tokenizer, drafter
        self._requests, self._config, self._rounds = requests, config, rounds
        gc.collect()  # engines are cyclic: an unused one holds device memory until collected
        spec = drafter().spec
        self.depth = min(
            spec.max_depth, spec.max_nodes if config.num_draft_tokens == "auto" else config.num_draft_tokens
        )
        self._plain = Engine(base, PlainDecoding(), tokenizer, config)
        decode_all(self._plain, requests[:_WARM_UP])

    def run(self, settings: VerifierSettings) -> VerifierRun:
        """Decode the requests under a verifier.

        Raises:
            LoadError: The verifier does not fit the target model or the drafter.
            RequestError: The verifier does not take the requests' settings.
        """
        plain, requests = self._plain, self._requests
        gc.collect()
        engine = Engine(self._base, self._drafter(), self._tokenizer, self._config, verifier=make_verifier(settings))
        decode_all(engine, requests[:_WARM_UP])
        rates: list[float] = []
        plain_rates: list[float] = []
        first: list[Generation] = []
        for turn in range(self._rounds):
            # Alternate the order, so that a changing load of the machine affects both alike.
            both = [(engine, rates), (plain, plain_rates)]
            for one, found in both if turn % 2 == 0 else both[::-1]:
                seconds, made = decode_all(one, requests)
                found.append(per_second(sum(len(generation.token_ids) for generation in made), seconds))
                if one is engine and not first:
                    first = made
        return VerifierRun(
            settings,
            [one.token_ids for one in first],
            [one.text for one in first],
            sum(len(one.lenient) for one in first),
            total(one.counts for one in first),
            rates,
            plain_rates,
        )


_COLOURS = {"fly": "#0072B2", "pad": "#D55E00", "typical": "#009E73"}
"""From the colour-blind safe palette of Okabe and Ito."""
_STYLES = ({"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "s"}, {"linestyle": ":", "marker": "^"})
"""Line styles of one verifier; a line may be a single point."""


@dataclass(frozen=True)
class VerifierFigures:
    """Speed and utility of a verifier.

    Args:
        utility: Sums over the requests: of exact decoding, and of this verifier.
        beta: New tokens per target forward.
        gamma: Speed relative to plain decoding.
        lenient_tokens: Tokens that the target model would not have chosen.
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
        """Return a run's figures, from the utility of each answer of exact decoding and of this run."""
        sums = PairedSums()
        for pair in zip(exact, scores, strict=True):
            sums.add(*pair)
        return cls(run.verifier, sums, run.beta, run.gamma, run.lenient_tokens, run.counts)

    @property
    def kept(self) -> float | None:
        """Share of exact decoding's utility that is kept; None where that is 0."""
        return kept_share(self.utility.difference)

    def keeps(self, share: float) -> bool:
        return self.kept is not None and self.kept >= share

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
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
    """Return a verifier's name and numeric settings."""
    return ", ".join([settings.name, *_numbers(settings)])


def _numbers(settings: VerifierSettings) -> list[str]:
    return [f"{name} {value:g}" for name, value in settings.given.items() if not isinstance(value, str)]


def fastest_that_keeps(found: Sequence[VerifierFigures], keep: float) -> list[VerifierFigures]:
    """Return each lenient verifier's setting of largest β that keeps at least the share `keep` of utility, if any."""
    best: dict[str, VerifierFigures] = {}
    for one in found:
        name = one.verifier.name
        if one.verifier == EXACT or not one.keeps(keep):
            continue
        if name not in best or one.beta > best[name].beta:
            best[name] = one
    return list(best.values())


def in_order(found: Sequence[VerifierFigures]) -> list[VerifierFigures]:
    """Return figures by verifier, each from the strictest value of the varied setting."""
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
    """Plot utility over β, a line for each verifier and window of `fly`; `kept` are highlighted."""
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
    panel.set(xlabel="β (tokens per forward of the target model)", ylabel="utility")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure


def _lines(found: Sequence[VerifierFigures]) -> dict[VerifierSettings, list[VerifierFigures]]:
    """Return figures by all of their settings but the varied one."""
    lines: dict[VerifierSettings, list[VerifierFigures]] = {}
    for one in found:
        lines.setdefault(EXACT if one.verifier == EXACT else with_value(one.verifier, None), []).append(one)
    return {
        common: line if common == EXACT else sorted(line, key=lambda one: leniency(one.verifier))
        for common, line in lines.items()
    }


def _place(one: VerifierFigures) -> tuple[float, float]:
    return one.beta, one.utility.difference.second


_HALVINGS = 4
"""Bisections of an interval: a sixteenth of it is left."""
_DIGITS = 4
_EXACT_AT = {"fly": math.log(3), "pad": 0.0}
"""Values at which only the target model's choices pass; for `fly`, the entropy of three tokens is at most ln 3."""
_PUBLISHED_WINDOW = 6


def next_setting(
    verifier: VerifierSettings, found: Sequence[VerifierFigures], keep: float, depth: int
) -> VerifierSettings | None:
    """Return the next setting to measure of a verifier whose grid has been measured; None at the end of the search.

    The interval between the most lenient setting that keeps enough and the next one is bisected. If the window of `fly`
    is not set, so are the intervals at twice the window, which is stricter and so may allow a smaller θ, and at half of
    it. An interval ends once its lenient end has no larger β than a setting that keeps enough: nothing within can be
    better.

    Args:
        verifier: Its name, and what is the same in all of its settings.
        found: The figures of its settings so far, in any order.
        keep: Share of exact decoding's utility that is enough.
        depth: Most draft tokens of a path.
    """
    if getattr(verifier, varied(verifier.name)) is not None:
        return None
    exact, best = _EXACT_AT.get(verifier.name), max((one.beta for one in found if one.keeps(keep)), default=0.0)
    strict, lenient = _limits(verifier, found, keep, exact)
    setting = _between(verifier, found, keep, (strict, lenient), best)
    for window in _other_windows(verifier, depth):
        if setting is None:
            # What keeps enough at a window does so at a longer one; what does not, does not at a shorter one.
            limits = (strict, None) if window > _PUBLISHED_WINDOW else (exact, lenient)
            setting = _between(replace(verifier, window=window), found, keep, limits, best)
    return setting


def _between(
    line: VerifierSettings,
    found: Sequence[VerifierFigures],
    keep: float,
    limits: tuple[float | None, float | None],
    best: float,
) -> VerifierSettings | None:
    """Return the next setting to measure on one line; None if there is nothing to gain.

    Args:
        line: Settings without the varied one.
        limits: Values believed to keep enough and too little, or None.
        best: The largest β that keeps enough.
    """
    strict, lenient = _limits(line, found, keep, limits[0])
    if strict is None:
        return None
    betas = {varied_value(one.verifier): one.beta for one in _on(line, found)}
    if lenient is None:
        lenient = limits[1]
    elif betas[lenient] <= best:
        return None
    grid = grid_values(line.name)
    if lenient is None:
        return None if grid[-1] in betas else with_value(line, grid[-1])
    middle = round((strict + lenient) / 2, _DIGITS)
    if len(betas.keys() - set(grid)) >= _HALVINGS or middle in (strict, lenient):
        return None
    return with_value(line, middle)


def _limits(
    line: VerifierSettings, found: Sequence[VerifierFigures], keep: float, strict: float | None
) -> tuple[float | None, float | None]:
    """Return the most lenient value that keeps enough (`strict` if none was measured), and the next one, if any."""
    tried = _on(line, found)
    last = max((place for place, one in enumerate(tried) if one.keeps(keep)), default=-1)
    if last >= 0:
        strict = varied_value(tried[last].verifier)
    following = tried[last + 1 :]
    return strict, varied_value(following[0].verifier) if following else None


def _on(line: VerifierSettings, found: Sequence[VerifierFigures]) -> list[VerifierFigures]:
    """Return the figures on a line, from the strictest."""
    some = [one for one in found if with_value(one.verifier, None) == line]
    return sorted(some, key=lambda one: leniency(one.verifier))


def _other_windows(verifier: VerifierSettings, depth: int) -> list[int]:
    """Return further windows of `fly` to try. A mismatch needs a window of draft tokens and one more."""
    if verifier.name != "fly" or verifier.window is not None:
        return []
    longer, shorter = min(2 * _PUBLISHED_WINDOW, depth - 1), _PUBLISHED_WINDOW // 2
    return [longer, shorter] if longer > _PUBLISHED_WINDOW else [shorter]
