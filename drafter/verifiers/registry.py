"""Verifiers by name. A new verifier is one module and one line here."""

from __future__ import annotations

from drafter.errors import LoadError
from drafter.verifiers.contract import Verifier
from drafter.verifiers.exact import ExactVerifier

VERIFIERS: dict[str, type[Verifier]] = {verifier.name: verifier for verifier in (ExactVerifier,)}


def make_verifier(name: str) -> Verifier:
    """A verifier by its name.

    Raises:
        LoadError: There is no such verifier.
    """
    if name not in VERIFIERS:
        raise LoadError(f"no verifier {name!r}: use {', '.join(VERIFIERS)}")
    return VERIFIERS[name]()
