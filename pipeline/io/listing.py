"""Input: its files, the splits of datasets, and where a row has its prompt."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import pyarrow as pa
import yaml
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.column_types import is_list, is_text
from pipeline.io.files import Location, in_parallel, is_pattern, locate, pattern_base, pattern_regex
from pipeline.io.reading import InputFile, read_file
from pipeline.settings import Format, ReadingConfig

_SAMPLE_BYTES = 1 << 20


def input_fingerprints(listing: InputListing) -> list[list[Any]]:
    """Return each file's name, size, and 16 hex digits for a sample of its content, or raise `InputError`."""

    def fingerprint(one: InputFile) -> list[Any]:
        try:
            with listing.filesystem.open_input_file(one.path) as file:
                return [one.name, one.size, hashlib.sha256(_sample(file, one.size)).hexdigest()[:16]]
        except OSError as error:
            raise InputError(f"input {one.path} cannot be read: {one_line(error)}") from error

    return in_parallel(fingerprint, listing.files)


def _sample(file: Any, size: int) -> bytes:
    if size <= 2 * _SAMPLE_BYTES:
        return bytes(file.read())
    beginning = bytes(file.read(_SAMPLE_BYTES))
    file.seek(size - _SAMPLE_BYTES)
    return beginning + bytes(file.read())


# Hugging Face datasets: the files of a split.

HUB = "hf://"
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
    """List those of a folder's files `names` that belong to a dataset's split; None if the folder just holds files.

    Raises:
        InputError: There is no such split or subset, there are several and none was requested, or files are missing.
    """
    if "dataset_dict.json" in names:
        _refuse_subset(uri, subset)
        folder = _choose(uri, "split", json.loads((root / "dataset_dict.json").read_text())["splits"], split)
        return _saved_files(uri, root, names, f"{folder}/")
    if "state.json" in names:
        _refuse_subset(uri, subset)
        own = json.loads((root / "state.json").read_text()).get("_split")
        if split is not None and split != own:
            raise InputError(f"input {uri} is one split, {own or 'which has no name'}: leave out reading.split")
        return _saved_files(uri, root, names)
    subsets = _declared_subsets(root) if "README.md" in names else {}
    if subsets:
        chosen = subsets[_choose(uri, "subset", subsets, subset)]
        patterns = chosen[_choose(uri, "split", chosen, split)]
        listed: set[str] = set()
        for pattern in patterns:
            matching = list(filter(pattern_regex(pattern).fullmatch, names))
            if not matching:
                raise InputError(
                    f"input {uri} has no {pattern}, which its README.md lists: fetch all files of the split"
                )
            listed.update(matching)
        return [name for name in names if name in listed]
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


def _saved_files(uri: str, root: Location, names: Sequence[str], folder: str = "") -> list[str]:
    if f"{folder}state.json" not in names:
        raise InputError(f"input {uri} is incomplete: it has no {folder}state.json. {_SAVE_AGAIN}")
    state = json.loads((root / f"{folder}state.json").read_text())
    listed = [f"{folder}{one['filename']}" for one in state["_data_files"]]
    if missing := sorted(set(listed).difference(names)):
        raise InputError(
            f"input {uri} is incomplete: it has no {missing[0]}, and {len(missing)} of the {len(listed)} files that "
            f"state.json lists are missing. {_SAVE_AGAIN}"
        )
    return listed


def _refuse_missing_shards(uri: str, names: Sequence[str]) -> None:
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
    """Return a file's split by its path in a repository; None if the path does not tell."""
    if shard := _SHARD.fullmatch(name):
        return _split_in(shard[1]) or shard[1]
    folder, _, file = name.rpartition("/")
    return _split_in(file) or _split_in(folder)


def _split_in(text: str) -> str | None:
    words = re.split(r"[^A-Za-z0-9]+", text)
    return next((split for split, keywords in _KEYWORDS.items() if any(word in keywords for word in words)), None)


def _declared_subsets(root: Location) -> dict[str, dict[str, list[str]]]:
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
    # Patterns by split. `data_files` may be one pattern, several, or several with their splits.
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


def _choose(uri: str, what: str, choices: Collection[str], asked: str | None) -> str:
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


_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "csv": (".csv",),
    "text": (".txt", ".text"),
    "arrow": (".arrow",),
}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
_UNREADABLE = (".xz", ".zip", ".br", ".7z")
"""Compressions of files that would otherwise be missed without a word among others of a folder."""


@dataclass(frozen=True)
class InputListing:
    """The files of an input, sorted by path. All have one format."""

    filesystem: fs.FileSystem
    files: tuple[InputFile, ...]

    @property
    def of_json(self) -> bool:
        return any(file.format == "jsonl" for file in self.files)


def list_input(uri: str, format: str = "auto", split: str | None = None, subset: str | None = None) -> InputListing:
    """List the files of an input, without those that have a path part that begins with `.` or `_`.

    Raises:
        InputError: The input does not exist, holds no readable file, or its names do not tell their format.
    """
    wanted = "jsonl" if format == "openai" else format
    root, is_folder, found = _find(uri)
    of_split = None
    if is_folder:
        there = [name for name, info in found.items() if info.type == fs.FileType.File or format_of(name)]
        with _errors_name(uri):
            of_split = dataset_files(uri, root, there, split, subset)
    elif split is not None or subset is not None:
        raise InputError(f"input {uri} is not a dataset's folder: leave out reading.split and reading.subset")
    if of_split is not None:
        chosen_names = set(of_split)
        found = {name: info for name, info in found.items() if name in chosen_names}
    files = []
    for name, info in found.items():
        guess = format_of(name)
        chosen = guess if wanted == "auto" else wanted
        may_be_folder = info.type == fs.FileType.NotFound and "." not in info.base_name
        if is_folder and of_split is None and (guess is None or guess != chosen) and not may_be_folder:
            continue  # a folder may hold other files beside its data
        if info.type != fs.FileType.File:
            what = "is a link to nothing" if info.type == fs.FileType.NotFound else "is neither a file nor a folder"
            raise InputError(f"input {info.path} {what}: put the file there, or take the name away")
        if name.lower().endswith(_UNREADABLE):
            raise InputError(
                f"input {info.path} cannot be unpacked ({', '.join(_COMPRESSIONS)} can): compress it like these"
            )
        if chosen is None:
            raise InputError(f"the name of input {info.path} does not tell its format: set reading.format")
        files.append(InputFile(info.path, name, info.size, chosen))  # type: ignore[arg-type]
    if not files:
        suffixes = [suffix for one, some in _SUFFIXES.items() if wanted in ("auto", one) for suffix in some]
        looked = f"holds no readable file (looked for {', '.join(suffixes)})"
        raise InputError(f"input {uri} {looked if is_folder else 'matches no file'}")
    formats = sorted({file.format for file in files})
    if is_folder and len(formats) > 1:
        raise InputError(f"input {uri} holds files of several formats ({', '.join(formats)}): set reading.format")
    return InputListing(root.filesystem, tuple(files))


def format_of(name: str) -> Format | None:
    """Return a file's format by its name; None if the name does not tell."""
    lower = name.lower()
    for compression in (*_COMPRESSIONS, *_UNREADABLE):
        lower = lower.removesuffix(compression)
    return next((found for found, suffixes in _SUFFIXES.items() if lower.endswith(suffixes)), None)


def _find(uri: str) -> tuple[Location, bool, dict[str, fs.FileInfo]]:
    # The root, whether the URI names a folder, and the files by their path below the root, without hidden ones.
    by_pattern = is_pattern(uri) and ("://" in uri or locate(uri).type == fs.FileType.NotFound)
    root = locate(pattern_base(uri) if by_pattern else uri)
    with _errors_name(uri):
        info = root.info
        if info.type == fs.FileType.NotFound:
            raise InputError(f"input {uri} does not exist")
        if info.type == fs.FileType.File:
            return root, False, {root.name: info}
        if info.type != fs.FileType.Directory:
            raise InputError(f"input {uri} is neither a file nor a folder")
        infos = _below(root)
    pattern = pattern_regex(locate(uri).path) if by_pattern else None
    files = {}
    for info in sorted(infos, key=lambda info: str(info.path)):
        name = str(info.path[len(root.path) :].lstrip("/"))
        hidden = any(part[0] in "._" for part in name.split("/"))
        if info.type != fs.FileType.Directory and not hidden and (pattern is None or pattern.fullmatch(info.path)):
            files[name] = info
    return root, not by_pattern, files


def _below(root: Location) -> list[fs.FileInfo]:
    if not isinstance(root.filesystem, fs.LocalFileSystem):
        return list(root.filesystem.get_file_info(fs.FileSelector(root.path, recursive=True)))

    # On a local disk, pyarrow leaves out broken links, and follows circular ones again and again.
    def refuse(error: OSError) -> NoReturn:
        raise error

    paths: list[str] = []
    for folder, folders, files in os.walk(root.path, onerror=refuse, followlinks=True):
        # Hidden folders are left out, and need not be readable.
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path) and f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(path)}/"):
                raise InputError(f"input {path} is a link to a folder that it is in: its rows would have no end")
        paths += [os.path.join(folder, name) for name in files]
    return list(root.filesystem.get_file_info(paths))


@contextmanager
def _errors_name(uri: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The hub's client raises errors of its own. Elsewhere these four come from files that only look like a dataset.
        if not uri.startswith(HUB) and not isinstance(error, (OSError, ValueError, LookupError, TypeError)):
            raise
        raise InputError(f"input {uri} cannot be listed: {one_line(error)}") from error


# Prompts: their column, and its kind.

_ID_COLUMN = "id"
_LOOK_ROWS = 100


@dataclass(frozen=True)
class PromptSource:
    """Location of a row's prompt.

    Args:
        kind: `openai` is the body of an OpenAI request.
        id_column: The column that names a row; None where the row's file and line do.
        own_sampling: Whether the first rows bring sampling settings of their own.
        ids_found: Whether `id_column` was detected, not configured.
    """

    column: str
    kind: Literal["text", "messages", "openai"] = "text"
    id_column: str | None = None
    own_sampling: bool = False
    ids_found: bool = False


NAME_ROWS = "set reading.id_column to a column that names each row, or to '' to name rows by file and line"


BATCH = PromptSource("body", "openai", "custom_id", own_sampling=True)


def find_prompts(listing: InputListing, config: ReadingConfig) -> PromptSource:
    """Find the prompts by the first rows; `InputError` if there are none, or a column is missing or unusable."""
    if config.format == "openai":
        return BATCH
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, _LOOK_ROWS):
            if _is_batch(file, chunk.columns.column_names, config):
                return BATCH
            if len(chunk.problems) == len(chunk.numbers):
                problem = chunk.problems[0]
                raise InputError(f"no row at the start of {file.path} can be read: {problem.message}")
            return _choose_source(file, chunk.columns.schema, config)
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def _is_batch(file: InputFile, columns: list[str], config: ReadingConfig) -> bool:
    unset = config.prompt_column is None and config.messages_column is None and config.id_column is None
    return config.format == "auto" and file.format == "jsonl" and unset and {"custom_id", "url", "body"} <= {*columns}


def _choose_source(file: InputFile, schema: pa.Schema, config: ReadingConfig) -> PromptSource:
    own = config.sampling_column in schema.names
    found = config.id_column is None and _ID_COLUMN in schema.names and _may_be_ids(schema.field(_ID_COLUMN).type)
    ids = _ID_COLUMN if found else config.id_column or None
    messages = config.messages_column
    if messages is None and config.prompt_column is None and "prompt" not in schema.names:
        messages = "messages" if "messages" in schema.names else None
    if messages is not None:
        source = PromptSource(messages, "messages", ids, own, found)
    else:
        source = PromptSource(config.prompt_column or "prompt", "text", ids, own, found)
    setting = "prompt_column" if messages is None else "messages_column"
    for column, name in ((source.column, setting), (source.id_column, "id_column")):
        if column is not None and column not in schema.names:
            raise InputError(
                f"{file.path} has no column {column!r} (it has {', '.join(schema.names)}): set reading.{name}"
            )
    check_types(file, schema, source)
    return source


def check_types(file: InputFile, schema: pa.Schema, source: PromptSource) -> None:
    """Raise `InputError` if a table's columns cannot hold prompts or ids. In files of lines, rows are judged alone."""
    if file.format in ("jsonl", "text"):
        return
    for column in filter(None, (source.column, source.id_column)):
        if column not in schema.names:
            problem = f"{file.path} has no column {column!r} (it has {', '.join(schema.names)})"
            raise InputError(f"{problem}: {NAME_ROWS}" if column == source.id_column else problem)
    kind = schema.field(source.column).type
    messages = source.kind == "messages" and is_list(kind)
    if not (_is_text(kind) or messages or pa.types.is_null(kind)):
        wanted = "chat messages" if source.kind == "messages" else "text"
        raise InputError(f"column {source.column!r} of {file.path} holds {kind}, not {wanted}")
    if source.id_column is not None and not _may_be_ids(kind := schema.field(source.id_column).type):
        problem = f"column {source.id_column!r} of {file.path} holds {kind}: ids are text or integers"
        raise InputError(f"{problem}: {NAME_ROWS}")


def _may_be_ids(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pa.types.is_integer(kind) or pa.types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    return is_text(kind) or isinstance(kind, pa.JsonType)
