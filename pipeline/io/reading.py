"""Reading an input file of any format, in chunks of rows.

A file that cannot be read stops the job before anything is generated. A line that is not a record does not: its row
goes to `errors/`, and the other rows are unharmed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.chunks import Chunk
from pipeline.io.line_files import read_json_lines, read_text_lines
from pipeline.io.listing import InputFile
from pipeline.io.table_files import read_arrow, read_csv, read_parquet

_ALWAYS_READ = 1 << 30
_MOST_EXPANDED = 1000
"""A file of rows expands to fewer times its own size. Some bytes can expand to anything, and would fill the disk."""


def read_file(
    filesystem: fs.FileSystem,
    file: InputFile,
    rows: int,
    text_column: str | None = None,
    json_column: str | None = None,
) -> Iterator[Chunk]:
    """Read a file in chunks of at most `rows` rows, none of them empty.

    Args:
        filesystem: Where the file is.
        file: The file.
        rows: Most rows of a chunk.
        text_column: In JSON lines, a row whose value in this column is not text gets a problem.
        json_column: In JSON lines, objects of this column stay JSON text, whatever they have in common.

    Raises:
        InputError: The file is damaged or is not of its format.
    """
    try:
        if file.format == "jsonl":
            chunks = read_json_lines(filesystem, file, rows, text_column, json_column)
        else:
            readers = {"text": read_text_lines, "parquet": read_parquet, "csv": read_csv, "arrow": read_arrow}
            chunks = readers[file.format](filesystem, file, rows)
        size = 0
        for chunk in chunks:
            size += chunk.columns.nbytes
            if size > max(_ALWAYS_READ, _MOST_EXPANDED * file.size):
                raise InputError(
                    f"{file.path} has {file.size} bytes and expands to more than {size >> 20} MiB of rows, which looks "
                    "like a decompression bomb: split the file, or store the repeated column once"
                )
            yield chunk
    except InputError:
        raise
    except Exception as error:
        on_hub = filesystem.type_name == "py::fsspec+hf"  # its client raises errors of its own
        if not isinstance(error, (OSError, pa.ArrowException, EOFError)) and not on_hub:
            raise
        raise InputError(f"{file.path} cannot be read as {file.format}: {one_line(error, 300)}") from error
