"""Opens images of untrusted sources: a file's bytes, an address, pixels; each within limits, as upright RGB."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from drafter.errors import RequestError, one_line, shown

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's decoders that may run. Not TIFF's: it takes as much memory for a strip as the file asks for."""
_MOST_SCANS = 64
"""Passes of a progressive JPEG, each over all pixels. Encoders write ten, and a small file may have thousands."""
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd7\xff])")  # others have no length, or are a byte of a scan
_SCAN, _END = 0xDA, 0xD9
_DEEP = ("I", "F")  # first letters of modes with more than 8 bits, which Pillow would cut off at 255
_HEAD = 256
_MOST_RATIO = 200
"""Of an image's longer side to the shorter one, as Qwen2-VL has it: processors make a square of it, or make the shorter
side as long as they need it."""
_BLANKS = b" \t\r\n\f\v"
_STRIP = 1 << 20  # pixels of which a digest is made at a time

# A hostile file could fill the log, and the memory of warnings shown, with what Pillow warns of.
warnings.filterwarnings("ignore", module=r"PIL\.")

Fetch = Callable[[str, int], bytes]
"""Returns the content of an address, at most so many bytes; it raises `RequestError` with the reason if it cannot."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the images of a prompt.

    Args:
        bytes: Most bytes of the files of all images together.
        pixels: Most pixels of all images together. Each takes up to 14 bytes while a prompt is made of them.
        images: Most images of a prompt.
    """

    bytes: int = 32 << 20
    pixels: int = 24 << 20  # a photograph of most cameras
    images: int = 32


def open_image(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> Image.Image:
    """Open an image as RGB, turned upright by its EXIF data, as transformers does. Of an animation it is the first one.

    Args:
        source: A path, a `data:` URI, the bytes of a file, Hugging Face's `{"bytes", "path"}`, an image of Pillow, or
            pixels of 0 to 255, `[H, W]` or `[H, W, 1, 3 or 4]`, as an array or as lists.
        fetch: Reads what is at an address that is no `data:` URI; by default the file of that path.

    Raises:
        RequestError: It cannot be read, is no image of `FORMATS`, is damaged or exceeds a limit.
    """
    (opened,) = open_images([given_image(source, limits, fetch=fetch)], limits)
    return opened


@dataclass(frozen=True)
class GivenImage:
    """An image's file, or its pixels, and how messages name it."""

    content: bytes | Image.Image
    name: str


def given_image(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> GivenImage:
    """Return what is at a source, which is not decoded; see `open_image`. One that is given already stays as it is."""
    if isinstance(source, GivenImage):
        return source
    with _named_errors(name := named(source)):
        return GivenImage(_given(source, limits, fetch), name)


def given_images(sources: Sequence[Any], limits: ImageLimits, *, fetch: Fetch | None = None) -> list[GivenImage]:
    """Return what is at the sources of a prompt's images; raise `RequestError` for too many, or too many bytes."""
    if len(sources) > limits.images:
        raise RequestError(f"the prompt has {len(sources)} images, and may have up to {limits.images}")
    given, left = [], limits.bytes
    for source in sources:
        given.append(given_image(source, limits, fetch=fetch))
        left -= 0 if isinstance(given[-1].content, Image.Image) else len(given[-1].content)
        if left < 0:
            so_far = f"up to this one the prompt's images have more than {limits.bytes:,} bytes, the limit"
            raise RequestError(f"{given[-1].name}: {so_far}")
    return given


def open_images(given: Sequence[GivenImage], limits: ImageLimits) -> list[Image.Image]:
    """Return images as RGB, turned upright. None is decoded before the sizes of all are known.

    Raises `RequestError` if one is no image of `FORMATS`, is damaged or much longer than wide, or they exceed a limit.
    """
    opened: deque[Image.Image] = deque()
    pixels = 0
    for one in given:
        with _named_errors(one.name):
            opened.append(_within(_opened(one.content, limits), limits))
            pixels += opened[-1].width * opened[-1].height
            if pixels > limits.pixels:
                so_far = f"up to this one the prompt's images have {pixels:,} pixels"
                raise RequestError(f"{so_far}, and {limits.pixels:,} are the limit: give fewer or smaller ones")
    upright = []
    for one in given:
        with _named_errors(one.name):
            upright.append(_upright(opened.popleft()))
    return upright


def image_content(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> bytes:
    """Return the bytes of an image's file, which is not decoded. Raises as `open_image`, and for mere pixels."""
    given = given_image(source, limits, fetch=fetch)
    if isinstance(given.content, Image.Image):
        raise RequestError(f"{given.name}: it has pixels, and no file")
    return given.content


def image_digest(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> str:
    """Return hex digits that equal files, or equal pixels, have in common.

    No file is decoded. Raises as `open_image`.
    """
    with _named_errors(named(source)):
        given = _given(source, limits, fetch)
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(given, Image.Image):
            digest.update(f"{given.mode} {given.size}".encode())
            given = given.tobytes()
        digest.update(given)
        return digest.hexdigest()


def pixel_digest(image: Image.Image) -> bytes:
    """Return what images of equal pixels have in common, whatever file they come from."""
    digest = hashlib.sha256(b"%dx%d:" % image.size)
    rows = max(_STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        # A processor may lay what is transparent over white, also where the pixels are RGB and a colour counts as such.
        digest.update(strip.convert("RGBA").tobytes())
    return digest.digest()


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    # Decoders raise whatever a damaged file leads them to.
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{name}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        raise RequestError(f"{name}: it is damaged: {one_line(error, 200)}") from error


def named(source: Any) -> str:
    if isinstance(source, Mapping):
        source = source.get("path") or source
    if isinstance(source, str | os.PathLike):
        address = os.fspath(source)
        return "image in a data: URI" if is_data(address) else f"image {shown(address, 300)}"
    return "image"


def is_data(address: str) -> bool:
    return address[:5].lower() == "data:"


def unwrapped(source: Any) -> Any:
    """Return the bytes in Hugging Face's `{"bytes", "path"}`, or else the path; what has neither stays as it is."""
    if not isinstance(source, Mapping):
        return source
    return next((source[name] for name in ("bytes", "path") if source.get(name) is not None), source)


def _given(source: Any, limits: ImageLimits, fetch: Fetch | None) -> bytes | Image.Image:
    """Return an image's file, or its pixels."""
    source = unwrapped(source)
    if isinstance(source, str | os.PathLike):
        address = os.fspath(source)
        return _of_data(address, limits) if is_data(address) else (fetch or read_file)(address, limits.bytes)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(refuse_large(source, limits.bytes))
    if isinstance(source, Image.Image):
        return _within(source, limits)
    if isinstance(source, list | tuple) or hasattr(source, "__array__"):
        return _of_pixels(source, limits)
    raise RequestError(f"it must be a path, a data: URI, bytes, an image of Pillow or an array, not {shown(source)}")


def refuse_large(content: bytes | bytearray | memoryview, most: int) -> bytes | bytearray | memoryview:
    """Return a file's content, of which no more than its first `most + 1` bytes need be there.

    Raises `RequestError` if it has more than `most` bytes.
    """
    if len(content) > most:
        raise RequestError(f"it has more than {most:,} bytes, the limit")
    return content


def read_file(address: str, most: int) -> bytes:
    """Read the file of a path; raises as a `Fetch` does."""
    if "://" in address or address.startswith("file:"):
        raise RequestError("no address is fetched here: give its content, or a path")
    path = Path(address).expanduser()
    try:
        if not path.is_file():  # others, such as a pipe, might never end
            raise RequestError("there is no such file")
        with path.open("rb") as stream:
            return bytes(refuse_large(stream.read(most + 1), most))
    except RequestError:
        raise
    except (OSError, ValueError) as error:  # a path may hold a null byte
        raise RequestError(f"it cannot be read: {one_line(error)}") from error


def _of_data(address: str, limits: ImageLimits) -> bytes:
    comma = address.find(",", 0, _HEAD)
    kind, *others = address[5 : max(comma, 0)].lower().split(";")
    if "base64" not in others:
        raise RequestError("it must be of the form data:image/png;base64,…")
    if kind.strip() and not kind.strip().startswith("image/"):
        raise RequestError(f"it holds {shown(kind.strip())}, which is no image")
    if len(address) > 2 * limits.bytes + _HEAD:  # before anything is made of it; blanks may follow each few letters
        raise RequestError(f"it has more than {limits.bytes:,} bytes, the limit")
    try:
        text = address[comma + 1 :].encode("ascii").translate(None, _BLANKS)
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"it is not base64: {one_line(error)}") from error
    return bytes(refuse_large(content, limits.bytes))


def _of_pixels(source: Any, limits: ImageLimits) -> Image.Image:
    pixels = _of_lists(source, limits) if isinstance(source, list | tuple) else np.asarray(source)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise RequestError(f"pixels must be [H, W] or [H, W, 3], not {list(pixels.shape)}")
    if not np.issubdtype(pixels.dtype, np.integer):
        raise RequestError(f"pixels must be integers of 0 to 255, not {pixels.dtype}")
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 255):
        raise RequestError(f"pixels must be 0 to 255, not {pixels.min()} to {pixels.max()}")
    return Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))


def _of_lists(source: Sequence[Any], limits: ImageLimits) -> npt.NDArray[Any]:
    # An array of texts has room for the longest one everywhere.
    pixels: npt.NDArray[Any] = np.array(source, dtype=object)
    if pixels.size > 4 * limits.pixels:
        raise RequestError(f"it has more than {limits.pixels:,} pixels, the limit")
    kinds = {type(one) for one in pixels.ravel()}
    if any(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        raise RequestError("its rows are not of one length")
    if strange := sorted(kind.__name__ for kind in kinds if not issubclass(kind, int | np.integer) or kind is bool):
        raise RequestError(f"pixels must be integers of 0 to 255, not of type {strange[0]}")
    try:
        return pixels.astype(np.int64)
    except OverflowError as error:
        raise RequestError("pixels must be integers of 0 to 255") from error


def _opened(content: bytes | Image.Image, limits: ImageLimits) -> Image.Image:
    """Return an image whose size is known; its pixels are decoded when they are asked for."""
    if isinstance(content, Image.Image):
        return content
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise RequestError(_what_it_is(content)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(f"it has more than {limits.pixels:,} pixels, the limit") from error
    if isinstance(image, JpegImageFile) and _has_many_scans(content):
        raise RequestError(f"it is a JPEG of more than {_MOST_SCANS} passes: save it again")
    return image


def _has_many_scans(content: bytes) -> bool:
    """Return whether a JPEG has more than `_MOST_SCANS` passes; behind its end there may be a film, or other images."""
    place, scans = 2, 0
    while scans <= _MOST_SCANS and (found := _MARKER.search(content, place)) and (marker := found[1][0]) != _END:
        scans += marker == _SCAN
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return scans > _MOST_SCANS


def _what_it_is(content: bytes) -> str:
    head = content[:_HEAD].lstrip().lower()
    formats = f"it is not one of {', '.join(FORMATS)}"
    if not content:
        return "it is empty"
    if b"<svg" in head or head.startswith(b"<?xml"):
        return f"it is a drawing in SVG or other XML, which is not read: {formats}"
    return f"{formats}, or is damaged"


def _within(image: Image.Image, limits: ImageLimits) -> Image.Image:
    width, height = image.size
    if not width * height:
        raise RequestError("it has no pixels")
    if width * height > limits.pixels:
        raise RequestError(f"it has {width:,} × {height:,} pixels, and {limits.pixels:,} are the limit")
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise RequestError(
            f"it has {width:,} × {height:,} pixels, and may be {_MOST_RATIO} times as long as wide: cut it in pieces"
        )
    return image


def _upright(image: Image.Image) -> Image.Image:
    if image.mode.startswith(_DEEP):
        raise RequestError(f"its pixels have more than 8 bits (mode {image.mode}): convert it")
    image.load()
    with suppress(Exception):  # EXIF data that cannot be read says nothing about the pixels
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB")
