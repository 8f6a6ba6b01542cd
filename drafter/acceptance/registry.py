"""Verifiers by name. A new one is one module, and one line here."""

from __future__ import annotations

import math
from collections.abc import Callable

from drafter.acceptance.contract import Verifier
from drafter.acceptance.exact import ExactVerifier
from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError
from drafter.methods.fly.verifier import FlyVerifier
from drafter.methods.pad.verifier import PadVerifier
from drafter.methods.typical.verifier import TypicalVerifier

_MAKERS: dict[str, tuple[Callable[..., Verifier], tuple[str, ...]]] = {
    "exact": (ExactVerifier, ()),
    "fly": (FlyVerifier, ("theta", "window")),
    "pad": (PadVerifier, ("classifier", "sigma")),
    "typical": (TypicalVerifier, ("epsilon", "delta")),
}
"""Class of each verifier, and the settings that are its own."""


def make_verifier(settings: VerifierSettings) -> Verifier:
    """Return the verifier that settings ask for.

    Raises:
        LoadError: A setting is another verifier's, or has a value that is not allowed; or a classifier that is needed
            is not given or cannot be read.
    """
    made, own = _MAKERS[settings.name]
    given = settings.given
    if foreign := sorted(set(given) - set(own)):
        has = f"it has {', '.join(own)}" if own else "it has no settings"
        raise LoadError(f"the verifier {settings.name} has no {foreign[0]}: {has}")
    if infinite := [name for name, value in given.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise LoadError(f"verifier {settings.name}: {infinite[0]} must be a finite number")
    try:
        return made(**given)
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(f"verifier {settings.name}: {error}") from error
