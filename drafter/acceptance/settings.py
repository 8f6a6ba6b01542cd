"""Settings of verifiers, and verifiers by name. Imports no torch, which takes seconds, before one is made."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from drafter.errors import LoadError
from drafter.plugins import resolved

if TYPE_CHECKING:
    from drafter.acceptance.contract import Verifier


@dataclass(frozen=True)
class VerifierSettings:
    """Verifier, which decides which draft tokens become output.

    Args:
        name: `exact` gives the tokens of plain decoding. `fly`, `pad` and `typical` accept more, which changes the
            text; all of their output is marked.
        theta: Of `fly`: no mismatch is accepted where the target model's entropy is below this, in nats; 0.3 by
            default.
        window: Of `fly`: draft tokens from a mismatch on that decide; 6 by default.
        classifier: Of `pad`: folder of its classifier, made by `jobs.pivots` for the target model.
        sigma: Of `pad`: a token is accepted up to this probability that it makes the answer worse; 0.5 by default.
        epsilon: Of `typical`: a more probable token is accepted anywhere; 0.3 by default.
        delta: Of `typical`: share of the target model's own certainty that a token needs; 0.09 by default.
    """

    name: Literal["exact", "fly", "pad", "typical"] = "exact"
    theta: float | None = None
    window: int | None = None
    classifier: str | None = None
    sigma: float | None = None
    epsilon: float | None = None
    delta: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name, without `name`."""
        return {name: value for name, value in vars(self).items() if name != "name" and value is not None}


def make_verifier(settings: VerifierSettings) -> Verifier:
    """Return the verifier that settings ask for; raise `LoadError` for one that cannot be used."""
    from drafter.acceptance.contract import ExactVerifier

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
