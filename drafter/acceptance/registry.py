"""Verifiers by name."""

from __future__ import annotations

import inspect
import math

from drafter.acceptance.contract import Verifier
from drafter.acceptance.exact import ExactVerifier
from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError
from drafter.plugins import resolved


def make_verifier(settings: VerifierSettings) -> Verifier:
    """Return the verifier that settings ask for.

    Raises:
        LoadError: A setting belongs to another verifier or has an invalid value, or a classifier is missing or
            unreadable.
    """
    verifiers: dict[str, type[Verifier]] = {ExactVerifier.name: ExactVerifier, **resolved("verifiers")}
    if settings.name not in verifiers:
        raise LoadError(f"no verifier {settings.name!r}: there are {', '.join(verifiers)}")
    made, given = verifiers[settings.name], settings.given
    own = list(inspect.signature(made).parameters)
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
