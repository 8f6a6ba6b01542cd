"""The models that a configuration names, found and told from others without loading them.

Nothing here imports torch, which takes seconds: a mistake in a name is reported before that.
"""

from __future__ import annotations

from pathlib import Path

from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from pipeline.errors import InputError
from pipeline.io.fingerprints import folder_fingerprint

_PATH_BEGINNINGS = ("/", "./", "../", "~")


def model_name(model: str | None) -> str:
    """Return the hub id or folder of the base that a configuration names; None is the embedded one."""
    return model if model is not None else str(EMBEDDED_BASE)


def model_fingerprint(name: str) -> str:
    """Return what tells a base from others: the fingerprint of its folder, or its hub id.

    Raises:
        InputError: There is no model at the path.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"model {name} is not a model's folder: it has no config.json")
        return folder_fingerprint(folder)
    if folder.exists() or name.startswith(_PATH_BEGINNINGS) or name.count("/") > 1:
        raise InputError(f"model {name} is not a folder with a model")
    return name


def head_fingerprints(model: str | None, drafter: str) -> dict[str, str]:
    """Return the fingerprints of the draft heads in folders, embedded ones included, that `drafter` names for `model`.

    Raises:
        InputError: There is no head at a path.
    """
    if drafter == "auto" and model is None:
        drafter = "ctc"
    found = {}
    for name in [drafter] if Path(drafter).exists() else drafter.split("+"):
        embedded = EMBEDDED_HEADS / name
        folder = embedded if embedded.is_dir() else Path(name).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise InputError(f"drafter {name} is not a draft head's folder: it has no config.json")
            found[name] = folder_fingerprint(folder)
        elif folder.exists() or name.startswith(_PATH_BEGINNINGS):
            raise InputError(f"drafter {name} is not a folder with a draft head")
    return found
