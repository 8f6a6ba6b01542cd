"""Which files of results can be believed: a disk that lost its power, or a copy that broke off, leaves torn ones.

A file is looked at by its footer, and a part by the sum of its rows. What is not whole is deleted: then its parts are
missing, and are generated again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drafter.errors import printable
from pipeline.io.files import Location
from pipeline.io.table_files import parquet_rows
from pipeline.output.output_folder import OutputFolder
from pipeline.staging.staged_input import Part

_READERS = 16
_SHOWN = 3


@dataclass(frozen=True)
class ResultFile:
    """A file in `data/` or `errors/`.

    Args:
        place: Where it is.
        commits: Whether it is in `data/`, and so commits its parts.
        parts: Names of the parts whose rows it holds.
        rows: Their number by its footer; None where it is damaged.
    """

    place: Location
    commits: bool
    parts: frozenset[str]
    rows: int | None


def is_whole(output: OutputFolder, parts: Sequence[Part]) -> bool:
    """Return whether an output holds all rows of all parts, and nothing is damaged."""
    files = result_files(output)
    committed = {part for file in files if file.commits for part in file.parts}
    return not torn_files(files, _rows(parts)) and committed.issuperset(part.name for part in parts)


def discard_torn(output: OutputFolder, parts: Iterable[Part]) -> None:
    """Delete the files of parts that are not whole, and say so; only the holder of the lease may do so."""
    torn = torn_files(result_files(output), _rows(parts))
    if not torn:
        return
    names = ", ".join(file.place.path.removeprefix(f"{output.root.path}/") for file in torn[:_SHOWN])
    more = f" and {len(torn) - _SHOWN} others" if len(torn) > _SHOWN else ""
    print(f"results that are not whole are made again: {printable(names)}{more}", file=sys.stderr, flush=True)
    for file in torn:
        file.place.filesystem.delete_file(file.place.path)


def result_files(output: OutputFolder) -> list[ResultFile]:
    """Look at the footers of all files of results."""
    plan = output.compaction()
    found = []
    for folder, merges, commits in (
        (output.data, plan.data if plan else {}, True),
        (output.errors, plan.errors if plan else {}, False),
    ):
        for info in folder.children():
            name = info.path.rpartition("/")[2]
            if name.endswith(".parquet"):
                part = name.removesuffix(".parquet")
                found.append((folder / name, commits, frozenset(merges.get(part, [part]))))
    with ThreadPoolExecutor(_READERS) as pool:
        rows = pool.map(parquet_rows, (place for place, _, _ in found))
        return [ResultFile(*facts, count) for facts, count in zip(found, rows, strict=True)]


def torn_files(files: Iterable[ResultFile], rows: Mapping[str, int]) -> list[ResultFile]:
    """Choose the files that have to be deleted so that every part is there as a whole or not at all.

    Args:
        files: The files of results.
        rows: Rows of each part by its name. Files of other parts are somebody else's, and are left alone.

    Returns:
        The files in the order in which they can be deleted one by one: those that commit parts come first.
    """
    torn: list[ResultFile] = []
    for group in _groups(files):
        parts = frozenset[str]().union(*(file.parts for file in group))
        if not parts <= rows.keys():
            continue
        if not any(file.commits for file in group):
            # Its parts are missing. Their commits replace the errors of an attempt, but not those that are merged.
            torn += [file for file in group if file.rows is None or len(file.parts) > 1]
            continue
        damaged = [file for file in group if file.rows is None]
        standing = _standing([file for file in group if file.rows is not None])
        committed = frozenset[str]().union(*(file.parts for file in standing if file.commits))
        whole = committed == parts and sum(file.rows or 0 for file in standing) == sum(rows[part] for part in parts)
        torn += damaged if whole else group
    return sorted(torn, key=lambda file: (not file.commits, file.place.path))


def _groups(files: Iterable[ResultFile]) -> list[list[ResultFile]]:
    """Gather the files that have parts in common, directly or through others."""
    group_of: dict[str, list[ResultFile]] = {}
    for file in files:
        joined = [file]
        for group in {id(group): group for part in file.parts for group in [group_of.get(part, [])]}.values():
            joined += group
        for part in frozenset[str]().union(*(one.parts for one in joined)):
            group_of[part] = joined
    return list({id(group): group for group in group_of.values()}.values())


def _standing(files: list[ResultFile]) -> list[ResultFile]:
    """Leave out parts' own files beside the merged one that holds their rows: a compaction has not deleted them yet."""
    return [
        file for file in files if not any(file.commits == other.commits and file.parts < other.parts for other in files)
    ]


def _rows(parts: Iterable[Part]) -> dict[str, int]:
    return {part.name: part.rows for part in parts}
