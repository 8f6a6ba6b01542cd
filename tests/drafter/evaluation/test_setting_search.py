"""The search between the settings of a grid, on literal curves of β and kept utility."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.settings import VerifierSettings
from drafter.evaluation.verifiers import (
    VerifierFigures,
    fastest_that_keeps,
    leniency,
    search,
    title_of,
    verifier_grid,
)
from drafter.statistics import DecodeCounts, PairedSums

Curve = Callable[[VerifierSettings], tuple[float, float]]
"""β and the kept share of a setting."""

FLY, PAD, TYPICAL = VerifierSettings("fly"), VerifierSettings("pad", {"classifier": "c"}), VerifierSettings("typical")


def searched(verifier: VerifierSettings, curve: Curve, keep: float = 0.99, depth: int = 15) -> list[VerifierFigures]:

    def measure(one: VerifierSettings) -> VerifierFigures:
        beta, kept = curve(one)
        sums = PairedSums()
        sums.add(1.0, kept)
        counts = DecodeCounts(num_output_tokens=round(beta * 10**9), num_decode_steps=10**9)
        return VerifierFigures(one, [], [], 0, counts, 1.0, sums)

    found = search(verifier, measure, keep, depth)
    assert len({one.verifier for one in found}) == len(found)
    return found


def tried(verifier: VerifierSettings, curve: Curve, keep: float = 0.99, depth: int = 15) -> list[str]:
    """What is tried after the grid."""
    found = searched(verifier, curve, keep, depth)
    return [title_of(one.verifier).partition(", ")[2] for one in found[len(verifier_grid(verifier)) :]]


def sigma_up_to(limit: float) -> Curve:
    return lambda one: (2 + (one.settings.get("sigma") or 0), 1.0 if (one.settings.get("sigma") or 0) <= limit else 0.5)


def theta_from(limits: dict[int, float], slope: dict[int, float]) -> Curve:
    """At each window, a θ from which enough is kept, and how fast β rises as θ falls."""

    def curve(one: VerifierSettings) -> tuple[float, float]:
        window, theta = one.settings.get("window") or 6, one.settings.get("theta") or 0.0
        return 2 + slope[window] * (math.log(3) - theta), 1.0 if theta >= limits[window] else 0.5

    return curve


def test_the_interval_of_the_grid_is_halved() -> None:
    assert tried(PAD, sigma_up_to(0.8)) == ["sigma 0.8", "sigma 0.85", "sigma 0.825", "sigma 0.8125"]
    assert tried(PAD, sigma_up_to(0.01)) == ["sigma 0.025", "sigma 0.0125", "sigma 0.0063", "sigma 0.0094"]
    (best,) = fastest_that_keeps(searched(PAD, sigma_up_to(0.76)), 0.99)
    assert best.verifier.settings.get("sigma") == 0.75


def test_there_is_nothing_to_search_where_all_keeps_enough_or_a_setting_is_chosen() -> None:
    assert tried(PAD, sigma_up_to(1)) == []
    assert tried(VerifierSettings("fly", {"theta": 0.3}), theta_from({6: 1}, {6: 1})) == []
    assert tried(TYPICAL, lambda one: (2.0, 0.5)) == []  # no δ makes it exact


def test_an_interval_whose_lenient_end_is_no_faster_is_left() -> None:
    assert tried(PAD, lambda one: (3.0, sigma_up_to(0.8)(one)[1])) == []


def test_longer_and_shorter_windows_are_searched() -> None:
    curve = theta_from({6: 1.02, 12: 0.4, 3: 1.06}, {6: 20, 12: 5, 3: 200})
    assert tried(FLY, curve) == [
        *["theta 1.025", "theta 1.0125", "theta 1.0187", "theta 1.0218"],
        # Nothing is known to fail at the longer window before its most lenient θ is tried.
        *["theta 0, window 12", "theta 0.5109, window 12", "theta 0.2555, window 12", "theta 0.3832, window 12"],
        "theta 0.4471, window 12",
        *["theta 1.0587, window 3", "theta 1.0787, window 3", "theta 1.0687, window 3", "theta 1.0637, window 3"],
    ]
    (best,) = fastest_that_keeps(searched(FLY, curve), 0.99)
    assert (best.verifier.settings.get("theta"), best.verifier.settings.get("window")) == (1.0637, 3)


def test_a_window_that_cannot_be_faster_costs_one_try() -> None:
    curve = theta_from({6: 1.02, 12: 0.4, 3: 0}, {6: 20, 12: 1, 3: 0.1})
    assert [one for one in tried(FLY, curve) if "window 12" in one] == ["theta 0, window 12"]


@pytest.mark.parametrize(("depth", "windows"), [(15, {12, 3}), (9, {8, 3}), (7, {3})])
def test_windows_are_those_that_the_drafter_can_fill(depth: int, windows: set[int]) -> None:
    curve = theta_from(dict.fromkeys(range(1, 15), 0.2), {w: 10 if w == 6 else 20 for w in range(1, 15)})
    found = searched(FLY, curve, depth=depth)
    assert {one.verifier.settings.get("window") for one in found} - {None} == windows
    chosen = searched(VerifierSettings("fly", {"window": 4}), curve, depth=depth)
    assert {one.verifier.settings.get("window") for one in chosen} == {4}


@given(
    st.sampled_from([FLY, PAD, TYPICAL, VerifierSettings("fly", {"window": 2})]),
    st.floats(0.5, 1.0),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_what_is_named_keeps_enough_and_is_no_slower_than_the_grids(
    verifier: VerifierSettings, keep: float, depth: int, rng: object
) -> None:
    draws: dict[VerifierSettings, tuple[float, float]] = {}

    def curve(one: VerifierSettings) -> tuple[float, float]:
        return draws.setdefault(one, (rng.uniform(1, 9), rng.uniform(0.4, 1.1)))  # type: ignore[attr-defined]

    found = searched(verifier, curve, keep, depth)
    grid = fastest_that_keeps(found[: len(verifier_grid(verifier))], keep)
    named = fastest_that_keeps(found, keep)
    assert all(curve(one.verifier)[1] >= keep for one in named)
    assert not grid or named[0].beta >= grid[0].beta
    assert len(found) - len(verifier_grid(verifier)) <= 25


@given(st.floats(0.0, 1.0), st.sampled_from([FLY, PAD]))
def test_of_a_curve_that_only_falls_a_sixteenth_of_the_grids_interval_is_left(
    limit: float, verifier: VerifierSettings
) -> None:
    grid = [leniency(one) for one in verifier_grid(verifier)]
    edge = grid[0] + limit * (grid[-1] - grid[0])

    def curve(one: VerifierSettings) -> tuple[float, float]:
        return 3 + leniency(one), 1.0 if leniency(one) <= edge and one.settings.get("window") is None else 0.5

    (best,) = fastest_that_keeps(searched(verifier, curve), 0.99)
    wide = next(after - before for before, after in zip(grid, [*grid[1:], math.inf], strict=True) if after > edge)
    assert edge - leniency(best.verifier) <= (wide / 16 + 1e-3 if math.isfinite(wide) else 0)
