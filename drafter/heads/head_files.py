"""The two files of a draft head: in a folder, or on the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from drafter.errors import LoadError, first_line
from drafter.hub import hub_file, not_found

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PUBLISHED_WEIGHTS = (WEIGHTS_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
"""Names that weights may have."""
UNPICKLE = "python -m drafter.heads.public.unpickle"
"""Converts pickled weights, in a restricted process of its own."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def find_files(name: str) -> tuple[Path, Path]:
    """Return the configuration and the weights of a head.

    Args:
        name: A folder, or a hub id (`HF_HUB_OFFLINE` is respected).

    Raises:
        LoadError: There is no such head, or it lacks one of the files.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(name, folder)
    if folder.exists():
        raise LoadError(f"draft head {name!r} is a file: give the folder that holds it")
    hint = f"give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"no draft head at {name!r}: there is no such folder; {hint}")
    return _on_hub(name, hint)


def _in_folder(name: str, folder: Path) -> tuple[Path, Path]:
    if not (folder / CONFIG_FILE).is_file():
        raise LoadError(f"draft head {name!r} has no {CONFIG_FILE}: give a folder that a draft head was saved in")
    weights = next((folder / one for one in PUBLISHED_WEIGHTS if (folder / one).is_file()), None)
    if weights is None:
        raise LoadError(f"draft head {name!r} has no {WEIGHTS_FILE}{_only_pickles(folder)}")
    return folder / CONFIG_FILE, weights


def _on_hub(name: str, hint: str) -> tuple[Path, Path]:
    try:
        config_file = hub_file(name, CONFIG_FILE)
    except (OSError, ValueError, RuntimeError, HFValidationError) as error:
        raise LoadError(
            f"no draft head at {name!r}: no such folder, and as a hub id: {not_found(error)}; {hint}"
        ) from error
    for weights in PUBLISHED_WEIGHTS:
        try:
            return config_file, hub_file(name, weights)
        except EntryNotFoundError as error:
            missing = error
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"draft head {name!r}: {weights} cannot be downloaded: {first_line(error)}") from error
    reason = "is not in the local cache, and the hub cannot be reached"
    if not _is_offline(missing):
        reason = f"is not there; pickled weights are never loaded: `hf download {name}`, then `{UNPICKLE} FOLDER`"
    raise LoadError(f"draft head {name!r}: {WEIGHTS_FILE} {reason}") from missing


def _is_offline(error: BaseException) -> bool:
    return isinstance(error, LocalEntryNotFoundError)


def _only_pickles(folder: Path) -> str:
    """Say so if the folder has pickled weights instead."""
    found = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not found:
        return ""
    return (
        f", only {found[0]}: pickles are never loaded, because loading one runs code; `{UNPICKLE} {folder}` converts it"
    )
