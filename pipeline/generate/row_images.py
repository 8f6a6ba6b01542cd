"""Images of rows: found and identified where rows are staged, opened where prompts are made of them.

A staged row has the addresses of its images, and null for one whose bytes are in the row itself. What the row asks for
has their digests in their place, so that its seed and its result belong to these images, wherever they are kept.
"""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from pyarrow import fs

from drafter.errors import LoadError, RequestError, one_line
from drafter.images.messages import PLACE, take_images
from drafter.images.opening import (
    GivenImage,
    ImageLimits,
    given_image,
    image_digest,
    is_data,
    open_image,
    refuse_large,
    unwrapped,
)
from pipeline.command_line import say
from pipeline.errors import InputError, RowProblem
from pipeline.io.fetching import fetch_web, is_web
from pipeline.io.files import Location, in_parallel, locate
from pipeline.io.listing import PromptSource
from pipeline.settings import ImagesConfig

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

IMAGES = "images"
"""Column of a staged row: the addresses of its images."""
PROMPTS_BYTES = 256 << 20
"""Size limit of what processors make of the images of several rows that are handed on together."""
_IMAGE_KEY = '"image_url"'
"""An image's part of a message in OpenAI's form has this twice."""
_USUAL_SIZE = (1024, 1024)
"""Pixels of the image by which it is found how large prompts become."""


@dataclass(frozen=True)
class ImageReading:
    """How images of rows are read.

    Args:
        files: File system of the input, for addresses that are paths.
        hosts: As in `fetch_web`.
        prompt_bytes: Size of what the model's processor makes of an image of usual size.
    """

    files: fs.FileSystem
    limits: ImageLimits
    hosts: tuple[str, ...] = ()
    prompt_bytes: int = 0

    def fetch(self, address: str, most: int) -> bytes:
        """Return the content of an address of a staged row; raises as a `Fetch` does."""
        if is_web(address):
            return fetch_web(address, most, self.hosts)
        try:
            place = locate(address) if "://" in address else Location(self.files, address)
            info = place.info
            if info.type != fs.FileType.File:
                raise RequestError("there is no such file")
            if info.size is not None and info.size > most:
                raise RequestError(f"it has {info.size:,} bytes, and {most:,} are the limit")
            with place.filesystem.open_input_stream(place.path, compression=None) as stream:
                return bytes(refuse_large(stream.read(most + 1), most))
        except RequestError:
            raise
        except (OSError, ValueError) as error:  # of an address that leads nowhere, or has a null byte
            raise RequestError(f"it cannot be read: {one_line(error, 200)}") from error

    def refuse_many(self, count: int) -> None:
        """Raise `RequestError` for more images than a prompt may have."""
        if count > self.limits.images:
            raise RequestError(f"there are {count} images, and up to {self.limits.images} are read")

    def identity(self, source: Any) -> str:
        """Return what a result is kept by of an image: a digest, or the address in the web, which is not asked twice.

        Raises:
            RequestError: It cannot be read.
        """
        if isinstance(source, str) and is_web(source):
            return source
        return image_digest(source, self.limits, fetch=self.fetch)

    def given(self, source: Any, identity: str) -> GivenImage:
        """Return what is at the source of a staged row's image.

        Raises:
            RequestError: It cannot be read, or is not the one with this identity.
        """

        def fetch(address: str, most: int) -> bytes:
            content = self.fetch(address, most)
            if identity not in (address, image_digest(content, self.limits)):
                raise RequestError("it has changed since rows were read: choose another output, or change the input")
            return content

        return given_image(source, self.limits, fetch=fetch)


def seeing_processor(name: str, *, trust_remote_code: bool) -> ImageProcessor | None:
    """Load the processor of a target model that sees; None for one of text alone, or that cannot see here."""
    from drafter.images.processor import load_processor  # torch takes seconds to import: no check before waits for it

    try:
        return load_processor(name, trust_remote_code=trust_remote_code)
    except LoadError as error:
        say(f"model {name} reads text alone here: {one_line(error)}")
        return None


def image_reading(processor: ImageProcessor, config: ImagesConfig, files: fs.FileSystem) -> ImageReading:
    """Return how images are read; raises `InputError` if the processor cannot take any."""
    has_template = processor.tokenizer.chat_template is not None
    asked = [{"role": "user", "content": [PLACE]}] if has_template else processor.processor.image_token
    try:
        usual = type(processor)(processor.processor).encode(asked, [Image.new("RGB", _USUAL_SIZE)])  # of our own
    except RequestError as error:
        raise InputError(f"the processor of the model takes no images: {error}") from error
    size = sum(values.nbytes for values in usual.inputs.values())
    return ImageReading(files, config.limits, tuple(config.hosts), size)


def images_key(prompts: PromptSource) -> str:
    """Return the name in `asked` for the identities of a row's images, which is no column that is read."""
    return f"{prompts.column}:{IMAGES}"


def take_row_images(
    rows: Sequence[dict[str, Any]],
    prompts: PromptSource,
    file: str,
    reading: ImageReading,
    problems: dict[int, RowProblem],
) -> list[list[str | None] | None]:
    """Replace the images in what rows ask for by their identities, and return their addresses, row by row.

    Args:
        rows: What each row asks for, which is changed.
        file: Path of the rows' file: relative paths of images begin at its folder.
        problems: Gets what is wrong with a row, by its index.
    """
    if prompts.kind == "openai":  # a body is read as a whole where prompts are made; here its images are counted
        return [[None] * (row["body"].count(_IMAGE_KEY) // 2) or None if "body" in row else None for row in rows]
    found: dict[int, list[_Found]] = {}
    for index, row in enumerate(rows):
        given = row.pop(prompts.images_column, None) if prompts.images_column is not None else None
        if index in problems:
            continue
        try:
            sources = _sources(row, prompts, [_InRow(one) for one in images_of(given)])
            reading.refuse_many(len(sources))
            found[index] = [_found(one, posixpath.dirname(file), reading.limits) for one in sources]
        except RequestError as error:
            problems[index] = RowProblem("BadPrompt", str(error))
    flat = [(index, one) for index, some in found.items() for one in some]
    for (index, _), identity in zip(flat, in_parallel(_identity(reading), [one for _, one in flat]), strict=True):
        if isinstance(identity, RequestError):
            problems.setdefault(index, RowProblem("BadPrompt", str(identity)))
        else:
            rows[index].setdefault(images_key(prompts), []).append(identity)
    return [[one.address for one in found[index]] if found.get(index) else None for index in range(len(rows))]


def images_of(value: Any) -> list[Any]:
    """Return the images in a value of a column: none, one or several. None is also what a CSV has: an empty text.

    Numbers in two or three dimensions are pixels of one image, and in four those of several. Three are never several
    grey images: so the channels of one, which torch puts first, are refused where it is opened.
    """
    if value is None or (isinstance(value, str | list) and not value):
        return []
    if not isinstance(value, list | np.ndarray):
        return [value]
    return [value] if _dimensions(value) in (0, 2, 3) else list(value)


def _dimensions(value: Any) -> int:
    if isinstance(value, list):
        return 1 + (_dimensions(value[0]) if value and isinstance(value[0], list) else 0)
    return int(value.ndim)


@dataclass(frozen=True)
class _InRow:
    # An image of the row's own column, whose bytes stay there.
    source: Any


@dataclass(frozen=True)
class _Found:
    source: Any
    address: str | None


def _sources(row: dict[str, Any], prompts: PromptSource, given: list[_InRow]) -> list[Any]:
    if prompts.kind == "text":
        return list(given)
    messages = row.get(prompts.column)
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            return []  # what is wrong is said where the prompt is made
    taken, sources = take_images(messages, given)
    if sources:
        row[prompts.column] = taken
    return sources


def _found(source: Any, folder: str, limits: ImageLimits) -> _Found:
    in_row = isinstance(source, _InRow)
    source = unwrapped(source.source if isinstance(source, _InRow) else source)
    if isinstance(source, str):
        is_path = not (is_data(source) or "://" in source)
        address = posixpath.join(folder, source) if is_path else source
        return _Found(address, address)
    if isinstance(source, bytes):
        return _Found(source, None if in_row else f"data:;base64,{base64.b64encode(source).decode()}")
    stream = BytesIO()
    open_image(source, limits).save(stream, "PNG")  # pixels, which are large as lists
    address = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return _Found(address, address)


def _identity(reading: ImageReading) -> Any:
    def identity(found: _Found) -> str | RequestError:
        try:
            return reading.identity(found.source)
        except RequestError as error:
            return error

    return identity


# Where prompts are made.


def staged_images(addresses: Sequence[str | None] | None, value: Any) -> list[Any]:
    """Return the sources of a staged row's images; `value` is that of its column of images."""
    inside = (one for one in images_of(value) if isinstance(one, bytes) or (isinstance(one, dict) and one.get("bytes")))
    return [next(inside, None) if address is None else address for address in addresses or ()]


def with_places(text: str, count: int) -> list[dict[str, Any]]:
    """Return a text prompt after so many images, as messages."""
    return [{"role": "user", "content": [*[PLACE] * count, {"type": "text", "text": text}]}]


def with_marks(text: str, count: int, mark: str) -> str:
    """Return a text prompt that is continued as it is with the mark of each image, first if it has none itself."""
    return text if mark in text else mark * count + text
