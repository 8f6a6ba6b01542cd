"""The models that a configuration names, found and told from others without loading them.

Nothing here imports torch, which takes seconds: a mistake in a name is reported before that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter.drafters.names import check_name, kind_and_rest, leaf_names, model_and_device
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.errors import LoadError, one_line
from drafter.generation_defaults import GENERATION_FILE, read_generation_file
from drafter.verifiers.verifier_settings import VerifierSettings
from pipeline.engines.model_files import file_fingerprint, folder_fingerprint
from pipeline.errors import InputError

_PATH_BEGINNINGS = ("/", "./", "../", "~")
_CONFIG = "config.json"


def model_name(model: str | None) -> str:
    """Return the hub id or folder of the base that a configuration names; None is the embedded one."""
    return model if model is not None else str(EMBEDDED_BASE)


def model_fingerprint(name: str) -> str:
    """Return what tells a base from others: the fingerprint of its folder, or its hub id and commit.

    Raises:
        InputError: There is no model at the path, or on the hub.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise InputError(f"model {name} is not a model's folder: it has no {_CONFIG}")
        return folder_fingerprint(folder)
    if folder.exists() or name.startswith(_PATH_BEGINNINGS) or name.count("/") > 1:
        raise InputError(f"model {name} is not a folder with a model")
    return _on_hub("model", name)


def generation_settings(name: str) -> dict[str, Any]:
    """Return what a base's `generation_config.json` says; nothing where it has none.

    Args:
        name: As in `model_fingerprint`, which has found it.

    Raises:
        InputError: The file cannot be read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from drafter.hub import hub_file  # as in `_on_hub`

        try:
            folder = hub_file(name, GENERATION_FILE).parent
        except (OSError, ValueError, RuntimeError):  # most likely the model has no such file
            return {}
    try:
        return read_generation_file(folder, name)
    except LoadError as error:
        raise InputError(str(error)) from error


def head_fingerprints(model: str | None, drafter: str) -> dict[str, str]:
    """Return the fingerprints of draft heads, embedded ones included, draft models and tables that `drafter` names.

    Raises:
        InputError: There is no head or model at a path, or on the hub, or no table.
    """
    if drafter == "auto" and model is None:
        drafter = "ctc"
    found = {}
    for name in leaf_names(drafter):
        try:
            check_name(name)
        except LoadError as error:
            raise InputError(str(error)) from error
        kind, rest = kind_and_rest(name)
        if kind == "model":
            found[name] = model_fingerprint(model_and_device(rest)[0])
            continue
        if kind == "cacheback":
            found[name] = _table_fingerprint(name, rest)
            continue
        embedded = EMBEDDED_HEADS / name
        folder = embedded if embedded.is_dir() else Path(name).expanduser()
        if folder.is_dir():
            if not (folder / _CONFIG).is_file():
                raise InputError(f"drafter {name} is not a draft head's folder: it has no {_CONFIG}")
            found[name] = folder_fingerprint(folder)
        elif folder.exists() or name.startswith(_PATH_BEGINNINGS):
            raise InputError(f"drafter {name} is not a folder with a draft head")
        elif "/" in name:  # other drafters have names without
            found[name] = _on_hub("drafter", name)
    return found


def classifier_fingerprints(verifier: VerifierSettings) -> dict[str, str]:
    """Return the fingerprint of the classifier that a verifier's settings name, by its name; none if they name none.

    Raises:
        InputError: There is no such folder.
    """
    if verifier.classifier is None:
        return {}
    folder = Path(verifier.classifier).expanduser()
    if not folder.is_dir():
        raise InputError(f"verifier.classifier {verifier.classifier} is not a folder")
    return {verifier.classifier: folder_fingerprint(folder)}


def _table_fingerprint(name: str, path: str) -> str:
    """Return what tells a table of n-grams from others."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"drafter {name} names no table: there is no file {path} (make one with python -m jobs.cache)")
    return file_fingerprint(file)


def _on_hub(what: str, name: str) -> str:
    """Return a hub id with the commit that it stands for now, or in the local cache where the hub is not asked."""
    from drafter.hub import hub_file, not_found  # most jobs need no hub, and do not wait for this import

    try:
        file = hub_file(name, _CONFIG)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{what} {name} is no folder, and as a hub id: {one_line(not_found(error))} (give a folder, or a hub "
            "id that this machine can reach or has in its cache)"
        ) from error
    # The cache keeps each commit's files in a folder of its name.
    return f"{name}@{file.parent.name}"
