"""Splits of Hugging Face datasets: which of a folder's files belong to one, as the library `datasets` resolves them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.apart import Apart
from pipeline.io.files import Location

METADATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe a dataset, and hold none of its rows."""
UNREAD = ".huggingface.yaml"
"""A file that may declare splits, in place of the README, and is not read."""
_SAVE_AGAIN = "Copy the whole folder, or save the dataset again"
_MOST_METADATA = 16 << 20
# `datasets` takes seconds to import. It finds splits only by these words, by numbered shards, and in the README.
_MAY_TELL = re.compile(r"train|test|val|dev|-\d{5}-of-\d{5}")
_NUMBERED = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.[\w.]+")
_SECONDS, _NAMES_PER_SECOND, _BYTES = 20, 1000, 4 << 30  # limits of a hostile README


def split_files(
    uri: str, root: Location, names: Sequence[str], readable: Collection[str], split: str | None, subset: str | None
) -> list[str] | None:
    """List those of a folder's files `names` that belong to a dataset's split; None if all do.

    Args:
        readable: The names whose format is known: only they can tell splits.

    Raises:
        InputError: There is no such split or subset, there are several and none was requested, or files are missing.
    """
    if "dataset_dict.json" in names:
        _refuse_subset(uri, subset)
        folder = _choose(uri, "split", _read_json(root / "dataset_dict.json")["splits"], split)
        return _saved_files(uri, root, names, f"{folder}/")
    if "state.json" in names:
        _refuse_subset(uri, subset)
        own = _read_json(root / "state.json").get("_split")
        if split is not None and split != own:
            raise InputError(f"input {uri} is one split, {own or 'which has no name'}: leave out reading.split")
        return _saved_files(uri, root, names)
    card = _read(root / "README.md") if "README.md" in names else ""
    named = [name for name in names if name in readable]
    if "configs" not in card and split is None and subset is None and not any(map(_MAY_TELL.search, named)):
        return None
    seconds = _SECONDS + len(names) / _NAMES_PER_SECOND
    what = f"input {uri}: what its README.md and its files' names say of splits"
    read = Apart(_resolved, seconds, _BYTES)
    return read(uri, card, list(names), named, split, subset, what=what)  # type: ignore[no-any-return]


def _resolved(
    uri: str, card: str, names: Sequence[str], named: Sequence[str], split: str | None, subset: str | None
) -> list[str]:
    # In a process of its own: the README may ask for any amount of time and memory.
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns

    config = _config(uri, card, subset)
    declared, root = (config or {}).get("data_files"), _served(named)
    if folder := str((config or {}).get("data_dir") or "").strip("/"):
        root = f"{root}/{folder}"
    try:
        resolved = get_data_patterns(root) if declared is None else sanitize_patterns(declared)
    except EmptyDatasetError:
        if split is None:
            return []
        resolved = {}
    patterns = {str(name): list(map(str, some)) for name, some in resolved.items()}
    chosen = _choose(uri, "split", patterns, split)
    _served(names)
    found = {name: None for pattern in patterns[chosen] for name in _matching(uri, root, pattern, declared is not None)}
    files = [name for name in named if name in found]
    beside = [name for name in named if name not in found]
    if split is None and config is None and beside:
        raise InputError(
            f"input {uri} has the split {chosen} by its files' names, and others beside it, such as {beside[0]}: "
            "set reading.split, or give a pattern of the files that are meant"
        )
    if not files:
        raise InputError(f"input {uri} has no file of the split {chosen} in a format that is read: give a pattern")
    return files


def _config(uri: str, card: str, subset: str | None) -> dict[str, Any] | None:
    # What the README declares of a subset; None if it declares none.
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        declared = MetadataConfigs.from_dataset_card_data(DatasetCard(card).data)
        configs = MetadataConfigs({str(name): config for name, config in declared.items()})
        default = configs.get_default_config_name()
    except Exception as error:  # of YAML and of several validators
        problem = f"input {uri} has a README.md whose front matter `datasets` refuses ({one_line(error, 200)})"
        raise InputError(f"{problem}: mend it, or give a pattern of the files that are meant") from error
    if configs:
        return dict(configs[_choose(uri, "subset", configs, subset or default)])
    _refuse_subset(uri, subset)
    return None


def _matching(uri: str, root: str, pattern: str, is_declared: bool) -> list[str]:
    from datasets.data_files import resolve_pattern

    if "://" in pattern or "::" in pattern or pattern.startswith("/"):
        raise InputError(f"input {uri} has a README.md that lists {pattern}, outside of it: give that as the input")
    try:
        return [path.removeprefix(f"{_ROOT}/") for path in resolve_pattern(pattern, root)]
    except FileNotFoundError:
        if not is_declared:
            return []
        told = f"input {uri} has no {pattern}, which its README.md lists"
        raise InputError(f"{told}: fetch all files of the split") from None


_ROOT = "listing://input"


def _served(names: Collection[str]) -> str:
    """Have `fsspec` find these names, and nothing else, below the address that is returned."""
    import fsspec
    from fsspec.spec import AbstractFileSystem

    found = {f"input/{name}": {"name": f"input/{name}", "type": "file", "size": 0} for name in names}

    class Listing(AbstractFileSystem):
        protocol = "listing"
        cachable = False

        def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
            return dict(found) if detail else list(found)

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            if (name := self._strip_protocol(path)) in found:
                return found[name]
            raise FileNotFoundError(path)

    fsspec.register_implementation("listing", Listing, clobber=True)
    return _ROOT


def _read(file: Location) -> str:
    if file.info.size > _MOST_METADATA:
        raise InputError(f"{file.path} has more than {_MOST_METADATA >> 20} MiB: it cannot describe a dataset")
    with file.filesystem.open_input_stream(file.path, compression=None) as stream:
        return bytes(stream.readall()).decode("utf-8", "replace")


def _read_json(file: Location) -> dict[str, Any]:
    try:
        values = json.loads(_read(file))
    except RecursionError as error:
        raise ValueError(f"{file.name} is nested too deeply") from error
    return dict(values)


def _saved_files(uri: str, root: Location, names: Sequence[str], folder: str = "") -> list[str]:
    if f"{folder}state.json" not in names:
        raise InputError(f"input {uri} is incomplete: it has no {folder}state.json. {_SAVE_AGAIN}")
    listed = [f"{folder}{one['filename']}" for one in _read_json(root / f"{folder}state.json")["_data_files"]]
    if missing := sorted(set(listed).difference(names)):
        raise InputError(
            f"input {uri} is incomplete: it has no {missing[0]}, and {len(missing)} of the {len(listed)} files that "
            f"state.json lists are missing. {_SAVE_AGAIN}"
        )
    return listed


def refuse_missing_shards(uri: str, names: Sequence[str]) -> None:
    """Raise `InputError` if files are numbered as `-00001-of-00003`, and one is not there."""
    shards: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            shards.setdefault((numbered[1], int(numbered[3])), set()).add(int(numbered[2]))
    for (prefix, count), there in shards.items():
        if len(there) < count:
            missing = next(number for number in range(count) if number not in there)
            raise InputError(
                f"input {uri} is incomplete: it has no {prefix}-{missing:05d}-of-{count:05d}, and {count - len(there)} "
                f"of {count} such files are missing. Fetch them, or give a pattern of the files that are meant"
            )


def _choose(uri: str, what: str, choices: Collection[str], asked: str | None) -> str:
    if asked is None and len(choices) == 1:
        return next(iter(choices))
    names = ", ".join(choices) or "none"
    if asked is None:
        raise InputError(f"input {uri} has several {what}s ({names}): set reading.{what}")
    if asked not in choices:
        raise InputError(f"input {uri} has no {what} {asked!r} (there are: {names})")
    return asked


def _refuse_subset(uri: str, subset: str | None) -> None:
    if subset is not None:
        raise InputError(f"input {uri} does not declare subsets: leave out reading.subset, and give the files' folder")
