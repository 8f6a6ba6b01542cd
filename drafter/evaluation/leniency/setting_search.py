"""Between the settings of a grid: how lenient a verifier may be and still keep enough, found by halving intervals.

The search trusts that more lenient settings have a larger β and keep less, which holds of single trees but only roughly
of whole answers. That decides what is tried; what is named is always something that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from drafter.evaluation.leniency.kept_utility import VerifierFigures
from drafter.evaluation.leniency.setting_grid import grid_values, leniency, varied, varied_value, with_value
from drafter.verifiers.lenient.fly import FlyVerifier
from drafter.verifiers.verifier_settings import VerifierSettings

_HALVINGS = 4
"""How often an interval is halved: a sixteenth of it is left."""
_DIGITS = 4
_EXACT_AT = {"fly": math.log(3), "pad": 0.0}
"""Where nothing passes that the base does not choose: the entropy of three tokens, for one, is nowhere above ln 3."""
_PUBLISHED_WINDOW = FlyVerifier().lookahead


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
