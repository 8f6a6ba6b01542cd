"""Access to the Hugging Face hub. Probed once, as its client would retry each file for half a minute."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_download

from drafter.errors import first_line

_PATIENCE_SECONDS = 5.0
_KNOWN_SECONDS = 60.0  # lifetime of a cached probe: a long-lived process must notice that the network is back


def hub_answers() -> bool:
    """Return whether the hub can be asked for files; not with `HF_HUB_OFFLINE`."""
    return not constants.is_offline_mode() and _probe(constants.ENDPOINT, int(time.monotonic() / _KNOWN_SECONDS))


@lru_cache(maxsize=1)
def _probe(endpoint: str, when: int) -> bool:
    try:
        get_session().head(endpoint, timeout=_PATIENCE_SECONDS)  # by its own client, which knows of proxies
    except Exception:  # the client's HTTP library changes with its version
        return False
    return True


def hub_file(name: str, file: str) -> Path:
    """Return a file of a repository: downloaded if the hub answers, otherwise from the local cache.

    Raises `OSError` if it cannot be had (`not_found` says why), and `ValueError` if the name is no hub id.
    """
    return Path(hf_hub_download(name, file, local_files_only=not hub_answers()))


def local_only(name: str) -> bool:
    """Return whether transformers should look on this machine alone: the name is a folder, or no hub answers."""
    return Path(name).is_dir() or not hub_answers()


def not_found(error: BaseException) -> str:
    """Return why a repository's file was not found: where it was looked for, or what the hub says."""
    if hub_answers():
        return first_line(error)
    asked = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"the hub {constants.ENDPOINT} does not answer"
    return f"it is not in the cache {constants.HF_HUB_CACHE}, and {asked}"
