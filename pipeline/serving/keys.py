"""Bearer keys: who may ask. Only digests are kept, so no log, message or dump can show a key."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import InputError

ENVIRONMENT = "DRAFTER_API_KEYS"


def read_keys(file: str | None) -> tuple[bytes, ...]:
    """SHA-256 digests of the keys in `file` (one a line, `#` begins a comment) and in the environment (by commas).

    Raises:
        InputError: The file cannot be read, or was given and has no key; a key is not plain ASCII without spaces.
    """
    keys = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")]
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InputError(f"keys_file {file} cannot be read: {reason}") from error
        found = [line.partition("#")[0].strip() for line in lines]
        if not any(found):
            raise InputError(f"keys_file {file} has no key: write one on a line, or leave the setting out")
        keys += found
    keys = [key for key in keys if key]
    for place, key in enumerate(keys, start=1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(f"key {place} cannot be sent as a bearer token: use ASCII without spaces")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def may_ask(authorization: str | None, digests: Sequence[bytes]) -> bool:
    """Whether the `Authorization` header has one of the keys; without any keys, everybody may ask.

    The time it takes tells nothing about the keys: digests are compared, all of them, in constant time.
    """
    if not digests:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    given = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
    known = [hmac.compare_digest(given, digest) for digest in digests]
    return any(known) and scheme.lower() == "bearer"
