"""Images of an output's rows, as small pictures in a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

from PIL import Image

from drafter.errors import RequestError, one_line
from drafter.images.opening import open_image
from pipeline.generate.output_images import images_of_output, reading_of_output
from pipeline.generate.row_images import ImageReading
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder
from pipeline.report.outputs import Row

_SIDE = 480  # most pixels of a side of a picture in the page
_LOSSLESS = 128  # pixels of a side up to which a picture is a PNG; larger ones are JPEG


def pictures_of(output: OutputFolder, run: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the images of rows, by their names, as `data:` URIs, or as texts that say why there is none.

    Nothing is fetched from the web.
    """
    seen = [row for row in rows if row.get(PROMPT_IMAGES)]
    if not seen:
        return {}
    sources = images_of_output(output, run).sources([row["request_id"] for row in seen])
    reading = replace(reading_of_output(run), hosts=())
    found = {}
    for row in seen:
        name, count = row["request_id"], len(row[PROMPT_IMAGES])
        pictures = [_picture(one, reading) for one in sources.get(name, ())]
        found[name] = pictures or ["not shown: the staged input is gone"] * count
    return found


def _picture(source: Any, reading: ImageReading) -> str:
    try:
        image = open_image(source, reading.limits, fetch=reading.fetch)
    except RequestError as error:
        return f"not shown: {one_line(error)}"
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream, kind = BytesIO(), "png" if max(image.size) <= _LOSSLESS else "jpeg"
    image.save(stream, kind)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
