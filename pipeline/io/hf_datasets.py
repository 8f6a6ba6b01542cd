"""Hugging Face datasets: which files of a folder or a repository belong to a split.

A folder that `save_to_disk` wrote says it in its own JSON. A repository says it in its README's front matter, or by the
names of its files: https://huggingface.co/docs/hub/datasets-file-names-and-splits

The `datasets` package resolves splits by the same rules, but has no public function that only lists the files, takes
seconds to import, and would add pandas, dill and multiprocess to what every worker installs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipeline.errors import InputError
from pipeline.io.files import Location
from pipeline.io.path_patterns import pattern_regex

HUB = "hf://"
"""How URIs of the hub begin: `hf://datasets/OWNER/NAME[@REVISION][/PATH]`."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(?:.*/)?([\w.]+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.[\w.]+")
_NUMBERED = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.[\w.]+")
_SAVE_AGAIN = "Copy the whole folder, or save the dataset again"
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


def dataset_files(
    uri: str, root: Location, names: Sequence[str], split: str | None, subset: str | None
) -> list[str] | None:
    """List the files of a dataset's split.

    Args:
        uri: The folder as it was given, for messages.
        root: The folder.
        names: All files below it, relative to it.
        split: The split that was asked for.
        subset: The subset ("configuration") that was asked for.

    Returns:
        Names of the files; None where nothing says that the folder is more than its files.

    Raises:
        InputError: There is no such split or subset, there are several and none was asked for, or files are missing.
    """
    if "dataset_dict.json" in names:
        _refuse_subset(uri, subset)
        splits = {name: f"{name}/" for name in json.loads((root / "dataset_dict.json").read_text())["splits"]}
        folder = splits[_choose(uri, "split", splits, split)]
        if f"{folder}state.json" not in names:
            raise InputError(f"input {uri} is incomplete: it has no {folder}state.json. {_SAVE_AGAIN}")
        return _all_there(uri, names, [f"{folder}{name}" for name in _saved_files(root / folder.rstrip("/"))])
    if "state.json" in names:
        _refuse_subset(uri, subset)
        own = json.loads((root / "state.json").read_text()).get("_split")
        if split is not None and split != own:
            raise InputError(f"input {uri} is one split, {own or 'which has no name'}: leave out reading.split")
        return _all_there(uri, names, _saved_files(root))
    subsets = _declared_subsets(root) if "README.md" in names else {}
    if subsets:
        chosen = subsets[_choose(uri, "subset", subsets, subset)]
        patterns = chosen[_choose(uri, "split", chosen, split)]
        matches = {pattern: [name for name in names if pattern_regex(pattern).fullmatch(name)] for pattern in patterns}
        if nothing := [pattern for pattern, matching in matches.items() if not matching]:
            raise InputError(
                f"input {uri} has no {nothing[0]}, which its README.md lists: fetch all files of the split"
            )
        chosen_names = {name for matching in matches.values() for name in matching}
        return [name for name in names if name in chosen_names]
    _refuse_subset(uri, subset)
    found: dict[str, list[str]] = {}
    for name in names:
        if (its_split := split_of(name)) is not None:
            found.setdefault(its_split, []).append(name)
    # A folder on disk may just hold files; on the hub, a repository with several splits is never meant as a whole.
    if split is None and not (uri.startswith(HUB) and len(found) > 1):
        return None
    chosen_split = found[_choose(uri, "split", found, split)]
    _refuse_missing_shards(uri, chosen_split)
    return chosen_split


def _all_there(uri: str, names: Sequence[str], listed: list[str]) -> list[str]:
    """Return the files that a saved dataset lists.

    Raises:
        InputError: Some of them are missing.
    """
    if missing := sorted(set(listed).difference(names)):
        raise InputError(
            f"input {uri} is incomplete: it has no {missing[0]}, and {len(missing)} of the {len(listed)} files that "
            f"state.json lists are missing. {_SAVE_AGAIN}"
        )
    return listed


def _refuse_missing_shards(uri: str, names: Sequence[str]) -> None:
    """Refuse a split whose files say that there are more of them, as `train-00000-of-00002` does.

    Raises:
        InputError: Some are missing.
    """
    shards: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            shards.setdefault((numbered[1], int(numbered[3])), set()).add(int(numbered[2]))
    for (prefix, count), there in shards.items():
        if missing := sorted(set(range(count)).difference(there)):
            raise InputError(
                f"input {uri} is incomplete: it has no {prefix}-{missing[0]:05d}-of-{count:05d}, and {len(missing)} of "
                f"{count} such files are missing. Fetch them, or give a pattern of the files that are meant"
            )


def split_of(name: str) -> str | None:
    """Return the split that a file belongs to by its path in a repository; None if the path does not tell."""
    if shard := _SHARD.fullmatch(name):
        return _split_in(shard[1]) or shard[1]
    folder, _, file = name.rpartition("/")
    return _split_in(file) or _split_in(folder)


def _split_in(text: str) -> str | None:
    words = re.split(r"[^A-Za-z0-9]+", text)
    return next((split for split, keywords in _KEYWORDS.items() if any(word in keywords for word in words)), None)


def _saved_files(folder: Location) -> list[str]:
    """Files of a dataset that `save_to_disk` wrote."""
    return [one["filename"] for one in json.loads((folder / "state.json").read_text())["_data_files"]]


def _declared_subsets(root: Location) -> dict[str, dict[str, list[str]]]:
    """Patterns of files by subset and split, from the README's front matter."""
    try:
        matter = _FRONT_MATTER.match((root / "README.md").read_text())
        configs = yaml.safe_load(matter[1])["configs"] if matter else None
    except (ValueError, LookupError, TypeError, yaml.YAMLError):  # a README of something else
        configs = None
    subsets = {}
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and (splits := _declared_splits(config)):
            subsets[str(config.get("config_name", "default"))] = splits
    return subsets


def _declared_splits(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Patterns of files by split; `data_files` may be one pattern, several, or several with their splits."""
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
    """Choose the split or subset that was asked for, or the only one, or the subset `default`."""
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


def _refuse_subset(uri: str, subset: str | None) -> None:
    if subset is not None:
        raise InputError(f"input {uri} does not declare subsets: leave out reading.subset, and give the files' folder")
