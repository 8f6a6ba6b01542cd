"""Compaction: merges small files of results into large ones, once all rows are committed.

A plan is saved before any file is touched, and kept, as it tells the parts of a merged file. A merged file appears
complete, and only then are its parts' own files deleted. So a part's rows are always in its own file, in the merged
one, or in both; resuming the plan deletes the part's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import pyarrow as pa
import pyarrow.parquet

from pipeline.io.files import Location, write_twice
from pipeline.output.folder import CompactionPlan, OutputFolder

_ROW_GROUP_BYTES = 64 << 20
_THREADS = 4


def compact(output: OutputFolder, target_bytes: int | None) -> None:
    """Merge a completed job's files, or finish merging them.

    Args:
        target_bytes: Smaller files are merged with their neighbours until they reach it. None merges nothing, but
            finishes what an earlier submission began.
    """
    plan = output.compaction()
    if plan is None:
        if target_bytes is None:
            return
        plan = CompactionPlan(*(merges(_sizes(folder), target_bytes) for folder in (output.data, output.errors)))
        write_twice(output.compaction_file, json.dumps(vars(plan)))
    with ThreadPoolExecutor(_THREADS) as threads:
        for folder, planned in ((output.data, plan.data), (output.errors, plan.errors)):
            merge = partial(_merge, folder, {name for name, _ in _sizes(folder)}, output.temporary)
            list(threads.map(merge, planned.keys(), planned.values()))


def merges(sizes: Iterable[tuple[str, int]], target_bytes: int) -> dict[str, list[str]]:
    """Plan the merging of adjacent files.

    Args:
        target_bytes: Minimum size of a merged file; the last one may be smaller.

    Returns:
        Names of the merged files' sources, by the merged file's name.
    """
    groups: list[list[str]] = []
    held = target_bytes
    for name, size in sizes:
        if held >= target_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    # A name that begins with its first part's keeps the files in the order of their rows.
    return {f"{group[0]}-to-{group[-1]}": group for group in groups if len(group) > 1}


def _sizes(folder: Location) -> list[tuple[str, int]]:
    return [
        (info.path.rpartition("/")[2].removesuffix(".parquet"), info.size)
        for info in folder.children()
        if info.path.endswith(".parquet")
    ]


def _merge(folder: Location, there: set[str], aside: Location, merged: str, parts: list[str]) -> None:
    place = folder / f"{merged}.parquet"
    if merged not in there:
        with place.open_whole(aside / f"{folder.name}-{merged}.parquet") as stream:
            _write(stream, (folder / f"{part}.parquet" for part in parts))
    for part in parts:
        if part in there:
            folder.filesystem.delete_file((folder / f"{part}.parquet").path)


def _write(stream: pa.NativeFile, files: Iterable[Location]) -> None:
    tables = _gathered(files)
    first = next(tables)
    with pa.parquet.ParquetWriter(stream, first.schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _gathered(files: Iterable[Location]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for file in files:
        with file.filesystem.open_input_file(file.path) as stream:
            held.append(pa.parquet.ParquetFile(stream).read())
        if sum(table.nbytes for table in held) >= _ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)
