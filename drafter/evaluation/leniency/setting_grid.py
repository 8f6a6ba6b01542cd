"""Settings at which each lenient verifier is measured when nobody has chosen one."""

from __future__ import annotations

from dataclasses import replace

from drafter.verifiers.verifier_settings import VerifierSettings

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
