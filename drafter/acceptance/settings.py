"""Settings of verifiers. Nothing here imports torch, not even for type checkers: the command line runs such imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class VerifierSettings:
    """Verifier, which decides which draft tokens become output.

    Args:
        name: `exact` gives the tokens of plain decoding. `fly`, `pad` and `typical` accept more, which changes the
            text; all of their output is marked.
        theta: Of `fly`: no mismatch is accepted where the target model's entropy is below this, in nats; 0.3 by
            default.
        window: Of `fly`: draft tokens from a mismatch on that decide; 6 by default.
        classifier: Of `pad`: folder of its classifier, made by `drafter pivots` for the target model.
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
