"""Hugging Face datasets: which files of a folder or a repository belong to a split.

Folders that `save_to_disk` wrote say it themselves. Repositories say it in their README's front matter, or by the
names of their files: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipeline.errors import InputError
from pipeline.io.files import Location, glob_regex

HUB = "hf://"
"""How URIs of the hub begin: `hf://datasets/OWNER/NAME[@REVISION][/PATH]`."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(?:.*/)?([\w.]+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.[\w.]+")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


def dataset_files(
    uri: str, root: Location, names: Sequence[str], split: str | None, subset: str | None
) -> list[str] | None:
    """The files of a dataset's split, or None where nothing says that a folder is more than its files.

    Args:
        uri: The folder as it was given, for messages.
        root: The folder.
        names: All files below it, relative to it.
        split: The split that was asked for.
        subset: The subset ("configuration") that was asked for.

    Raises:
        InputError: There is no such split or subset, or it was not said which of several.
    """
    if "dataset_dict.json" in names:
        _no_subsets(uri, subset)
        splits = {name: f"{name}/" for name in json.loads((root / "dataset_dict.json").read_text())["splits"]}
        folder = splits[_choose(uri, "split", splits, split)]
        return [f"{folder}{name}" for name in _saved_files(root / folder.rstrip("/"))]
    if "state.json" in names:
        _no_subsets(uri, subset)
        own = json.loads((root / "state.json").read_text()).get("_split")
        if split is not None and split != own:
            raise InputError(f"input {uri} is one split, {own or 'which has no name'}: leave out reading.split")
        return _saved_files(root)
    subsets = _declared(root) if "README.md" in names else {}
    if subsets:
        chosen = subsets[_choose(uri, "subset", subsets, subset)]
        patterns = chosen[_choose(uri, "split", chosen, split)]
        expressions = [glob_regex(pattern) for pattern in patterns]
        return [name for name in names if any(expression.fullmatch(name) for expression in expressions)]
    _no_subsets(uri, subset)
    found: dict[str, list[str]] = {}
    for name in names:
        if (its_split := split_of(name)) is not None:
            found.setdefault(its_split, []).append(name)
    if split is None and not (uri.startswith(HUB) and len(found) > 1):
        return None
    return found[_choose(uri, "split", found, split)]


def split_of(name: str) -> str | None:
    """The split that a file belongs to by its path in a repository; None if that does not tell."""
    if shard := _SHARD.fullmatch(name):
        return _split_in(shard[1]) or shard[1]
    folder, _, file = name.rpartition("/")
    return _split_in(file) or _split_in(folder)


def _split_in(text: str) -> str | None:
    words = re.split(r"[^A-Za-z0-9]+", text)
    return next((split for split, keywords in _KEYWORDS.items() if any(word in keywords for word in words)), None)


def _saved_files(folder: Location) -> list[str]:
    return [one["filename"] for one in json.loads((folder / "state.json").read_text())["_data_files"]]


def _declared(root: Location) -> dict[str, dict[str, list[str]]]:
    """Patterns of files by subset and split, as the README's front matter has them."""
    try:
        matter = _FRONT_MATTER.match((root / "README.md").read_text())
        configs = yaml.safe_load(matter[1])["configs"] if matter else None
    except (ValueError, LookupError, TypeError, yaml.YAMLError):  # a text of some other kind
        configs = None
    subsets = {}
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and (splits := _splits(config)):
            subsets[str(config.get("config_name", "default"))] = splits
    return subsets


def _splits(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Patterns by split of a configuration, whose `data_files` may be a pattern, patterns, or patterns with splits."""
    folder = str(config.get("data_dir", "")).strip("/")
    files = config.get("data_files", "**" if folder else None)
    entries = files if isinstance(files, list) else [files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                splits.setdefault(split, []).append(f"{folder}/{path}" if folder else path)
    return splits


def _choose(uri: str, what: str, choices: Mapping[str, Any], asked: str | None) -> str:
    if asked is None and len(choices) == 1:
        return next(iter(choices))
    if asked is None and what == "subset" and "default" in choices:
        return "default"
    names = ", ".join(choices) or "none"
    if asked is None:
        raise InputError(f"input {uri} has several {what}s ({names}): set reading.{what}")
    if asked not in choices:
        raise InputError(f"input {uri} has no {what} {asked!r} (there are: {names})")
    return asked


def _no_subsets(uri: str, subset: str | None) -> None:
    if subset is not None:
        raise InputError(f"input {uri} does not declare subsets: leave out reading.subset, and give the files' folder")
