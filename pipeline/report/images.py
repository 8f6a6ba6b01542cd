"""Images of an output's rows, as small pictures in a page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from PIL import Image

from drafter.errors import RequestError, one_line
from drafter.images.messages import take_images
from drafter.images.opening import ImageLimits, open_image
from pipeline.errors import InputError
from pipeline.generate.row_images import IMAGES, ImageReading, staged_images
from pipeline.io.files import locate
from pipeline.io.parts import StagedInput
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder
from pipeline.report.outputs import Row

_SIDE = 480
"""Most pixels of a side of a picture in the page."""
_LOSSLESS = 128
"""Pixels of a side up to which a picture is a PNG; larger ones are JPEG."""


def pictures_of(output: OutputFolder, run: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the images of rows, by their names, as `data:` URIs, or as texts that say why there is none.

    Nothing is fetched from the web.
    """
    seen = [row for row in rows if row.get(PROMPT_IMAGES)]
    if not seen:
        return {}
    addresses = _addresses([row["request_id"] for row in seen], output)
    column = run["config"]["reading"].get("images_column")
    try:
        files = locate(run["config"]["input"]).filesystem
    except InputError:  # it may have moved away since
        files = output.root.filesystem
    reading = ImageReading(files, ImageLimits())
    found = {}
    for row in seen:
        name, count = row["request_id"], len(row[PROMPT_IMAGES])
        sources = _of_batch(row) or staged_images(addresses.get(name), row.get(column))
        found[name] = [_picture(one, reading) for one in sources] or ["not shown: the staged input is gone"] * count
    return found


def _addresses(names: Sequence[str], output: OutputFolder) -> dict[str, list[str | None]]:
    staged = StagedInput.load(output.staged)
    if staged is None:
        return {}
    there = set(output.staged.parquets())
    files = [staged.file(part).path for part in staged.parts if part.name in there]
    try:
        rows = pyarrow.dataset.dataset(files, filesystem=output.root.filesystem, format="parquet")
        some = rows.to_table(columns=["request_id", IMAGES], filter=pc.field("request_id").isin(list(names)))
    except (pa.ArrowInvalid, OSError):  # damaged: the page says that they are not shown
        return {}
    return dict(zip(some["request_id"].to_pylist(), some[IMAGES].to_pylist(), strict=True))


def _of_batch(row: Row) -> list[Any]:
    """Return the images of a request of an OpenAI batch; none for another row."""
    if not {"custom_id", "body"} <= row.keys():
        return []
    return take_images(json.loads(row["body"])["messages"])[1]


def _picture(source: Any, reading: ImageReading) -> str:
    try:
        image = open_image(source, reading.limits, fetch=reading.fetch)
    except RequestError as error:
        return f"not shown: {one_line(error)}"
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream, kind = BytesIO(), "png" if max(image.size) <= _LOSSLESS else "jpeg"
    image.save(stream, kind)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
