"""Settings at which each lenient verifier is measured when nobody has chosen one."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure

from drafter.acceptance.registry import make_verifier
from drafter.acceptance.settings import VerifierSettings
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
"""The setting of each that is varied, from the strictest value: the published one, and some on both sides of it."""


def varied(name: str) -> str:
    """Return which setting of a lenient verifier is varied."""
    return _GRIDS[name][0]


def grid_values(name: str) -> tuple[float, ...]:
    """Return the values that it is given, from the strictest to the most lenient."""
    return _GRIDS[name][1]


def varied_value(settings: VerifierSettings) -> float:
    """Return the value of what is varied.

    Args:
        settings: Of a lenient verifier, for which it is given.
    """
    return float(getattr(settings, varied(settings.name)))


def with_value(settings: VerifierSettings, value: float | None) -> VerifierSettings:
    """Return the settings with another value of what is varied."""
    return replace(settings, **{varied(settings.name): value})  # type: ignore[arg-type]


def leniency(settings: VerifierSettings) -> float:
    """Return a number that is larger the more lenient the varied setting is, everything else being the same.

    Args:
        settings: Of a lenient verifier, for which it is given.
    """
    strictest, *_, most_lenient = grid_values(settings.name)
    value = varied_value(settings)
    return value if most_lenient > strictest else -value


def verifier_grid(settings: VerifierSettings) -> list[VerifierSettings]:
    """Return settings of a lenient verifier, from the strictest to the most lenient.

    Args:
        settings: Its name, and what is the same in all of them.
    """
    if getattr(settings, varied(settings.name)) is not None:
        return [settings]  # somebody has chosen
    return [with_value(settings, value) for value in grid_values(settings.name)]


# ---- The same requests decoded under several verifiers, each beside plain decoding in the same round.

_WARM_UP = 2


@dataclass(frozen=True)
class VerifierRun:
    """What came of the requests under one verifier.

    Args:
        verifier: Its settings.
        token_ids: New tokens of each request, in the first round.
        texts: Their texts.
        lenient_tokens: Tokens that the base would not have chosen, in the first round.
        counts: Speculation counts of the first round.
        rates: Tokens per second, round by round.
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
        """β: new tokens per base forward."""
        return mean_acceptance_length(self.counts)

    @property
    def gamma(self) -> float:
        """γ: speed relative to plain decoding."""
        return speedup(self.rates, self.plain_rates)


class VerifierTrials:
    """Decodes the same requests under one verifier after another.

    Each has an engine of its own: an engine learns what pays under its verifier, reads the hidden states that this asks
    for, and on a GPU repeats steps that were recorded with it. So two engines exist at a time, this and a plain one.

    Args:
        base: The base model.
        tokenizer: Of the base.
        drafter: Makes a new drafter.
        requests: What to decode.
        config: The engines' sizes; requests wait in the queue.
        rounds: How often everything is timed.

    Attributes:
        depth: Draft tokens of a path at most.
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
        gc.collect()  # an engine refers to itself: one that nobody uses any more holds the device's memory until then
        spec = drafter().spec
        self.depth = min(spec.max_depth, spec.max_nodes if config.nodes == "auto" else config.nodes)
        self._plain = Engine(base, PlainDecoding(), tokenizer, config)
        decode_all(self._plain, requests[:_WARM_UP])

    def run(self, settings: VerifierSettings) -> VerifierRun:
        """Return what comes of the requests under a verifier.

        Raises:
            LoadError: The verifier does not fit the base or the drafter.
            RequestError: It does not take the requests' settings.
        """
        plain, requests = self._plain, self._requests
        gc.collect()
        engine = Engine(self._base, self._drafter(), self._tokenizer, self._config, verifier=make_verifier(settings))
        decode_all(engine, requests[:_WARM_UP])
        rates: list[float] = []
        plain_rates: list[float] = []
        first: list[Generation] = []
        for turn in range(self._rounds):
            # The order alternates, so that a machine that grows busy disturbs both alike.
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


# ---- Utility against speed: how much of exact decoding's utility each verifier keeps, and which keeps enough.

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


# ---- Between the settings of a grid: how lenient a verifier may be and still keep enough, found by halving intervals.

_HALVINGS = 4
"""How often an interval is halved: a sixteenth of it is left."""
_DIGITS = 4
_EXACT_AT = {"fly": math.log(3), "pad": 0.0}
"""Where nothing passes that the base does not choose: the entropy of three tokens, for one, is nowhere above ln 3."""
_PUBLISHED_WINDOW = 6


def next_setting(
    verifier: VerifierSettings, found: Sequence[VerifierFigures], keep: float, depth: int
) -> VerifierSettings | None:
    """Return what to measure next of a verifier whose grid has been measured; None at the end of the search.

    The grid's interval between the most lenient setting that keeps enough and the next one, which does not, is halved a
    few times. If the window of `fly` is not chosen, the same is done at twice the window, which is stricter and so may
    allow a smaller θ, and at half of it. An interval is left as soon as its lenient end, which keeps too little, has no
    larger β than a setting that keeps enough: nothing within can be better.

    Args:
        verifier: Its name, and what is the same in all of its settings.
        found: The figures of its settings so far, in any order.
        keep: Share of exact decoding's utility that is enough.
        depth: Draft tokens of a path at most.
    """
    if getattr(verifier, varied(verifier.name)) is not None:
        return None  # somebody has chosen
    exact, best = _EXACT_AT.get(verifier.name), max((one.beta for one in found if one.keeps(keep)), default=0.0)
    strict, lenient = _limits(verifier, found, keep, exact)
    setting = _between(verifier, found, keep, (strict, lenient), best)
    for window in _other_windows(verifier, depth):
        if setting is None:
            # What keeps enough at a window does so at a longer one, and what does not, at no shorter one.
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
    """What to measure next of settings that have all but the varied one in common; None if there is nothing to gain.

    Args:
        line: What they have in common.
        found: All figures so far.
        keep: Share that is enough.
        limits: Values that are believed to keep enough and too little, where any are.
        best: The largest β of all that keeps enough.
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
    """The most lenient value that keeps enough, `strict` where none was measured; and the next one, if there is one."""
    tried = _on(line, found)
    last = max((place for place, one in enumerate(tried) if one.keeps(keep)), default=-1)
    if last >= 0:
        strict = varied_value(tried[last].verifier)
    following = tried[last + 1 :]
    return strict, varied_value(following[0].verifier) if following else None


def _on(line: VerifierSettings, found: Sequence[VerifierFigures]) -> list[VerifierFigures]:
    """Figures of the settings that have all but the varied one in common, from the strictest."""
    some = [one for one in found if with_value(one.verifier, None) == line]
    return sorted(some, key=lambda one: leniency(one.verifier))


def _other_windows(verifier: VerifierSettings, depth: int) -> list[int]:
    """Windows of `fly` at which to look, too: a mismatch needs a window of drafts and one more."""
    if verifier.name != "fly" or verifier.window is not None:
        return []
    longer, shorter = min(2 * _PUBLISHED_WINDOW, depth - 1), _PUBLISHED_WINDOW // 2
    return [longer, shorter] if longer > _PUBLISHED_WINDOW else [shorter]
