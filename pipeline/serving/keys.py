"""Bearer keys, operators', and those of clients who agreed to learning. Only digests are kept, so that nothing can show
a key."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.serving.config import EVERYBODY, KeyRule, ServingLearning

ENVIRONMENT = "DRAFTER_API_KEYS"
"""Environment variable of the ingress with keys, separated by commas."""
_OPERATOR = "operator"  # word after the key of somebody who may also see what all clients together do
_OR_NONE = ", or set keys to none to answer everybody"


@dataclass(frozen=True)
class Keys:
    """SHA-256 digests of all clients' keys, and of those of operators among them; without any, everybody may ask."""

    clients: tuple[bytes, ...] = ()
    operators: tuple[bytes, ...] = ()

    def may_ask(self, authorization: str | None) -> bool:
        return not self.clients or _has_one(authorization, self.clients)

    def may_operate(self, authorization: str | None) -> bool:
        return not self.clients or _has_one(authorization, self.operators)

    def client(self, authorization: str | None) -> str:
        """Return a name for the sender of a request who may ask: one for each key. Without keys, all are one."""
        return _given(authorization).hex() if self.clients else ""


def settle(rule: KeyRule, file: str | None, *, loopback: bool) -> KeyRule:
    """Return the rule that the ingress is to apply.

    `auto` stays only where this machine alone can connect and nothing here names a key. Everywhere else a key that is
    missing where the ingress runs is a mistake, and not a reason to answer everybody.
    """
    if rule == "auto" and (not loopback or file is not None or ENVIRONMENT in os.environ):
        return "required"
    return rule


def read_keys(file: str | None, rule: KeyRule) -> Keys:
    """Return this process's keys.

    Keys come from the environment variable `DRAFTER_API_KEYS` (separated by commas) and from a file (one a line; `#`
    begins a comment). The word `operator` after one makes it an operator's.

    Raises:
        InputError: A source has no key or cannot be read, a key is needed and there is none, a key cannot be sent as a
            bearer token, or there are keys although the rule is `none`.
    """
    listed = os.environ.get(ENVIRONMENT)
    if rule == "none":
        if listed is not None and listed.strip():
            raise InputError(f"keys is none, but {ENVIRONMENT} has keys: leave one of the two out")
        return Keys()
    keys: list[str] = []
    if listed is not None:
        complaint = f"{ENVIRONMENT} is set but has no key: list keys in it, separated by commas{_OR_NONE}"
        keys += _some(listed.split(","), complaint)
    if file is not None:
        name = f"keys_file {file}"
        keys += _some(_lines(file, name), f"{name} has no key: write one on a line{_OR_NONE}")
    if not keys and rule == "required":
        raise InputError(f"there is no API key: set {ENVIRONMENT} or keys_file{_OR_NONE}")
    for place, key in enumerate(map(_key, keys), start=1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(f"key {place} cannot be sent as a bearer token: use ASCII without spaces")
    return Keys(_digests(keys), _digests(entry for entry in keys if _key(entry) != entry))


def _key(entry: str) -> str:
    key, _, word = entry.rpartition(" ")
    return key.rstrip() if word == _OPERATOR and key else entry


def _digests(entries: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(_key(entry).encode()).digest() for entry in entries)


def _some(entries: Iterable[str], complaint: str) -> list[str]:
    found = [entry.strip() for entry in entries if entry.strip()]
    if not found:
        raise InputError(complaint)
    return found


def _lines(file: str, name: str) -> list[str]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"{name} cannot be read: {reason}") from error
    return [line.partition("#")[0] for line in text.splitlines()]


def _has_one(authorization: str | None, digests: Sequence[bytes]) -> bool:
    # All digests are compared, each in constant time, so that the time tells nothing about the keys.
    given = _given(authorization)
    known = [hmac.compare_digest(given, digest) for digest in digests]
    return any(known) and (authorization or "").partition(" ")[0].lower() == "bearer"


def _given(authorization: str | None) -> bytes:
    key = (authorization or "").partition(" ")[2]
    return hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True)
class Agreement:
    """Clients that agreed to learning: all, or those with one of some keys."""

    everybody: bool = False
    digests: tuple[bytes, ...] = ()

    def covers(self, authorization: str | None) -> bool:
        return self.everybody or _has_one(authorization, self.digests)

    def covers_client(self, client: str) -> bool:
        """The same of a client by its name; see `Keys.client`."""
        return self.everybody or client in [digest.hex() for digest in self.digests]


def read_agreement(learning: ServingLearning, keys: Keys) -> Agreement:
    """Return who agreed, by the configuration and a file of keys on this machine.

    Args:
        keys: All that the endpoint knows; none where it answers everybody.

    Raises:
        InputError: The file cannot be read or has no keys, has a key that the endpoint does not know, or there are no
            keys to tell clients by.
    """
    if not learning.enabled:
        return Agreement()
    if learning.agreed == EVERYBODY:
        return Agreement(everybody=True)
    name = f"learning.agreed {learning.agreed}"
    if not keys.clients:
        raise InputError(
            f"{name} is a file of keys, but the endpoint has none, and cannot tell clients apart: set keys_file, or "
            f"learning.agreed to {EVERYBODY}"
        )
    found = _digests(_some(_lines(learning.agreed, name), f"{name} has no key: write one on a line"))
    for place, digest in enumerate(found, start=1):
        if digest not in keys.clients:
            raise InputError(f"{name}: key {place} is none of the endpoint's: leave it out, or add it to keys_file")
    return Agreement(digests=found)
