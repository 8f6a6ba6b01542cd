"""Images of rows: found and identified where rows are staged, opened where prompts are made of them.

A staged row has the addresses of its images, and null for one whose bytes are in the row itself. What the row asks for
has their digests in their place, so that its seed and its result belong to these images, wherever they are kept.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from pyarrow import fs

from drafter.errors import LoadError, RequestError, one_line
from drafter.half_characters import parsed_json
from drafter.images.messages import PLACE, take_images
from drafter.images.opening import GivenImage, ImageLimits, given_image, image_digest, is_data, open_image, unwrapped
from pipeline.command_line import say
from pipeline.errors import InputError, RowProblem, UnavailableError
from pipeline.io.fetching import fetch_web, is_web
from pipeline.io.files import in_parallel, locate
from pipeline.io.listing import PromptSource
from pipeline.io.named_files import (
    NamedFolder,
    folder_of_input,
    full_address,
    named_folder,
    read_named,
    scheme_of,
    state_of,
)
from pipeline.io.parts import StagedInput
from pipeline.settings import RowImagesConfig

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

IMAGES = "images"
"""Column of a staged row: the addresses of its images."""
IMAGE_STATES = "image_states"
"""Column of a staged row: for each image that is a file of its own, what it was as it was read; see `state_of`."""
StagedImage = tuple[str | None, str | None]
"""The address of a staged row's image, and its state."""
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
        folders: Folders whose files rows may name.
        scheme: That of the input, empty for a local one: paths of its rows are addresses there.
        hosts: As in `fetch_web`.
        prompt_bytes: Size of what the model's processor makes of an image of usual size.
    """

    limits: ImageLimits
    folders: tuple[NamedFolder, ...] = ()
    scheme: str = ""
    hosts: tuple[str, ...] = ()
    prompt_bytes: int = 0

    def fetch(self, address: str, most: int) -> bytes:
        """Return the content of an address of a staged row; raises as a `Fetch` does."""
        if is_web(address):
            return fetch_web(address, most, self.hosts)
        return read_named(address, self.folders, most)

    def refuse_many(self, count: int) -> None:
        """Raise `RequestError` for more images than a prompt may have."""
        if count > self.limits.images:
            raise RequestError(f"there are {count} images, and up to {self.limits.images} are read")

    def identity(self, source: Any) -> tuple[str, str | None]:
        """Return what a result is kept by of an image: a digest, or the address in the web, which is not asked twice.

        Of a file, its state comes second, as before it was read; see `state_of`.

        Raises:
            RequestError: It cannot be read.
        """
        if isinstance(source, str) and is_web(source):
            return source, None
        state = self.state(source) if isinstance(source, str) else None
        return image_digest(source, self.limits, fetch=self.fetch), state

    def state(self, address: str) -> str | None:
        """Return what the file of an address is now, see `state_of`; None where it has none, or it cannot be read."""
        if is_data(address) or is_web(address):
            return None
        try:
            return state_of(address, self.folders)
        except RequestError:
            return None

    def given(self, source: Any, identity: str | None) -> GivenImage:
        """Return what is at the source of a staged row's image.

        Raises:
            RequestError: It cannot be read.
            UnavailableError: It cannot be fetched now, or is not the one with this identity, if there is one.
        """

        def fetch(address: str, most: int) -> bytes:
            try:
                content = self.fetch(address, most)
            except RequestError as error:
                if identity in (None, address):
                    raise
                raise UnavailableError(str(error)) from error  # it was read as rows were
            if identity is not None and identity not in (address, image_digest(content, self.limits)):
                raise UnavailableError("it has changed since rows were read: submit the same command again")
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


def folders_of(config: RowImagesConfig, input: str | None = None) -> tuple[tuple[NamedFolder, ...], str]:
    """Return the folders whose images rows may name, and the scheme of the input, if there is one."""
    own = () if input is None else (folder_of_input(input),)
    return (*own, *map(named_folder, config.folders)), "" if input is None else scheme_of(input)


def image_reading(processor: ImageProcessor, config: RowImagesConfig, input: str | None = None) -> ImageReading:
    """Return how images of an input's rows are read.

    Raises:
        InputError: The processor cannot take any, or a folder cannot be opened.
    """
    for folder in config.folders:
        if not scheme_of(folder) and locate(folder).type != fs.FileType.Directory:
            raise InputError(f"images.folders: there is no folder {folder}")
    has_template = processor.tokenizer.chat_template is not None
    asked = [{"role": "user", "content": [PLACE]}] if has_template else processor.processor.image_token
    try:
        usual = type(processor)(processor.processor).encode(asked, [Image.new("RGB", _USUAL_SIZE)])  # of our own
    except RequestError as error:
        raise InputError(f"the processor of the model takes no images: {error}") from error
    size = sum(values.nbytes for values in usual.inputs.values())
    return ImageReading(config.limits, *folders_of(config, input), tuple(config.hosts), size)


def images_key(prompts: PromptSource) -> str:
    """Return the name in `asked` for the identities of a row's images, which is no column that is read."""
    return f"{prompts.column}:{IMAGES}"


def take_row_images(
    rows: Sequence[dict[str, Any]],
    prompts: PromptSource,
    file: str,
    reading: ImageReading,
    problems: dict[int, RowProblem],
) -> list[list[StagedImage] | None]:
    """Replace the images in what rows ask for by their identities, and return where these are, row by row.

    Args:
        rows: What each row asks for, which is changed.
        file: Path of the rows' file: relative paths of images begin at its folder.
        problems: Gets what is wrong with a row, by its index.
    """
    if prompts.kind == "openai":  # a body is read as a whole where prompts are made; here its images are counted
        counts = [str(row.get("body", "")).count(_IMAGE_KEY) // 2 for row in rows]
        return [[(None, None)] * count or None for count in counts]
    found: dict[int, list[tuple[Any, str | None]]] = {}  # sources, and their addresses
    for index, row in enumerate(rows):
        given = row.pop(prompts.images_column, None) if prompts.images_column is not None else None
        if index in problems:
            continue
        try:
            sources = row_sources(row, prompts, [_InRow(one) for one in images_of(given)])
            reading.refuse_many(len(sources))
            found[index] = [_found(one, file, reading) for one in sources]
        except RequestError as error:
            problems[index] = RowProblem("BadPrompt", str(error))

    def known_by(source: Any) -> tuple[str, str | None] | RequestError:
        try:
            return reading.identity(source)
        except RequestError as error:
            return error

    flat = [(index, *one) for index, some in found.items() for one in some]
    staged: list[list[StagedImage] | None] = [None] * len(rows)
    identities = in_parallel(known_by, [source for _, source, _ in flat])
    for (index, _, address), known in zip(flat, identities, strict=True):
        state = None
        if isinstance(known, RequestError):
            problems.setdefault(index, RowProblem("BadPrompt", str(known)))
        else:
            identity, state = known
            rows[index].setdefault(images_key(prompts), []).append(identity)
        staged[index] = [*(staged[index] or []), (address, state)]
    return staged


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
    if not isinstance(value, list):
        return int(value.ndim)
    count = 1
    while value and isinstance(value[0], list):
        value, count = value[0], count + 1
    return count


@dataclass(frozen=True)
class _InRow:
    # An image of the row's own column, whose bytes stay there.
    source: Any


def row_sources(row: dict[str, Any], prompts: PromptSource, given: Sequence[Any]) -> list[Any]:
    """Return the sources of a row's images, `given` in its column among them, and leave places of them in its messages.

    Raises:
        RequestError: Messages have other places than images.
    """
    if prompts.kind == "text":
        return list(given)
    messages = row.get(prompts.column)
    if isinstance(messages, str):
        try:
            messages = parsed_json(messages)
        except (ValueError, RecursionError):
            return []  # what is wrong is said where the prompt is made
    taken, sources = take_images(messages, given)
    if sources:
        row[prompts.column] = taken
    return sources


def _found(source: Any, file: str, reading: ImageReading) -> tuple[Any, str | None]:
    """Return a source that can be read where rows are staged, and its address where prompts are made."""
    in_row = isinstance(source, _InRow)
    source = unwrapped(source.source if in_row else source)
    if isinstance(source, str):
        address = source if is_data(source) else full_address(source, file, reading.scheme)
        return address, address
    if isinstance(source, bytes):
        return source, None if in_row else f"data:;base64,{base64.b64encode(source).decode()}"
    stream = BytesIO()
    open_image(source, reading.limits).save(stream, "PNG")  # pixels, which are large as lists
    address = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return address, address


def changed_images(staged: StagedInput, reading: ImageReading) -> str | None:
    """Return a hash of the images that staged rows name, if one of them is no longer what it was; None otherwise."""
    before: set[tuple[str, str | None]] = set()
    gone = {part.name for part in staged.damaged(staged.parts)}
    for part in staged.parts:
        if part.name not in gone:
            table = staged.file(part).read_parquet([IMAGES, IMAGE_STATES])
            addresses, states = (column.combine_chunks().flatten().to_pylist() for column in table.columns)
            before |= {one for one in zip(addresses, states, strict=True) if one[0] is not None and not is_data(one[0])}
    addresses = sorted({address for address, _ in before})
    now = list(zip(addresses, in_parallel(reading.state, addresses), strict=True))
    return None if before == set(now) else hashlib.blake2b(json.dumps(now).encode(), digest_size=16).hexdigest()


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
