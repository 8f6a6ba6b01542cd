"""Whose requests a head may learn from: clients who agreed, told by their keys. Without a word nobody has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.serving.ingress.keys import digests_in, may_ask
from pipeline.serving.serving_learning import EVERYBODY, ServingLearning


@dataclass(frozen=True)
class Agreement:
    """Who has agreed.

    Args:
        everybody: Whether all clients have.
        digests: Digests of the keys of those who have.
    """

    everybody: bool = False
    digests: tuple[bytes, ...] = ()

    def covers(self, authorization: str | None) -> bool:
        """Whether the sender of a request with this `Authorization` header has agreed."""
        return self.everybody or (bool(self.digests) and may_ask(authorization, self.digests))


def read_agreement(learning: ServingLearning, digests: Sequence[bytes]) -> Agreement:
    """Return who has agreed, by the configuration and a file of keys on this machine.

    Args:
        learning: The configuration.
        digests: Digests of all keys that the endpoint knows; none where it answers everybody.

    Raises:
        InputError: The file cannot be read or has no keys, has a key that the endpoint does not know, or there are no
            keys to tell clients by.
    """
    if not learning.enabled:
        return Agreement()
    if learning.agreed == EVERYBODY:
        return Agreement(everybody=True)
    name = f"learning.agreed {learning.agreed}"
    if not digests:
        raise InputError(
            f"{name} is a file of keys, but the endpoint has none, and cannot tell clients apart: set keys_file, or "
            f"learning.agreed to {EVERYBODY}"
        )
    found = digests_in(learning.agreed, name)
    unknown = [place for place, digest in enumerate(found, start=1) if digest not in digests]
    if unknown:
        raise InputError(f"{name}: key {unknown[0]} is none of the endpoint's: leave it out, or add it to keys_file")
    return Agreement(digests=found)
