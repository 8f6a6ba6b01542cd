"""Settings of verifiers. Nothing here imports torch, not even for type checkers: the command line runs such imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafter.errors import LoadError, shown, unknown_setting


@dataclass(frozen=True)
class VerifierSettings:
    """Verifier, which decides which draft tokens become output.

    Args:
        name: `exact` gives the tokens of plain decoding. `fly`, `pad` and `typical` accept more, which changes the
            text; all of their output is marked.
        settings: Its own settings by name; `--verifier.NAME VALUE` sets one of them.
    """

    name: str = "exact"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


def verifier_settings(verifier: VerifierSettings | Mapping[str, Any] | str | None) -> VerifierSettings:
    """Return a verifier's settings, given by its name or a mapping; raise `LoadError` for an unknown one."""
    if isinstance(verifier, VerifierSettings):
        return verifier
    given = {"name": verifier} if isinstance(verifier, str) else verifier or {}
    if not isinstance(given, Mapping):
        raise LoadError(f"verifier must be a name, VerifierSettings or a mapping of its fields, not {shown(verifier)}")
    if problem := unknown_setting(given, VerifierSettings):
        raise LoadError(f"verifier: {problem}")
    return VerifierSettings(**given)
