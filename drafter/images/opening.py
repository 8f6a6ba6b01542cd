"""Opens images of untrusted sources: a file's bytes, an address, pixels; each within limits, as upright RGB."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

# A hostile file could fill the log, and the memory of warnings shown, with what Pillow warns of.
warnings.filterwarnings("ignore", module=r"PIL\.")

Fetch = Callable[[str, int], bytes]
"""Returns the content of an address, at most so many bytes; it raises `RequestError` with the reason if it cannot."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the images of a prompt.

    Args:
        bytes: Largest size of a file.
        pixels: Most pixels of an image, which take 4 bytes each while it is opened.
        images: Most images of a prompt.
    """

    bytes: int = 32 << 20
    pixels: int = 50_000_000
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
    with _named_errors(source):
        given = _given(source, limits, fetch)
        image = given if isinstance(given, Image.Image) else _opened(given, limits)
        return _upright(_within(image, limits))


def image_content(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> bytes:
    """Return the bytes of an image's file, which is not decoded. Raises as `open_image`, and for mere pixels."""
    with _named_errors(source):
        given = _given(source, limits, fetch)
        if isinstance(given, Image.Image):
            raise RequestError("it has pixels, and no file")
        return given


def image_digest(source: Any, limits: ImageLimits, *, fetch: Fetch | None = None) -> str:
    """Return hex digits that equal files, or equal pixels, have in common.

    No file is decoded. Raises as `open_image`.
    """
    with _named_errors(source):
        given = _given(source, limits, fetch)
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(given, Image.Image):
            digest.update(f"{given.mode} {given.size}".encode())
            given = given.tobytes()
        digest.update(given)
        return digest.hexdigest()


@contextmanager
def _named_errors(source: Any) -> Iterator[None]:
    # Decoders raise whatever a damaged file leads them to.
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{named(source)}: {error}") from error
    except Exception as error:
        raise RequestError(f"{named(source)}: it is damaged: {one_line(error, 200)}") from error


def named(source: Any) -> str:
    """Return how messages name an image."""
    if isinstance(source, Mapping):
        source = source.get("path") or source
    if isinstance(source, str | os.PathLike):
        address = os.fspath(source)
        return "image in a data: URI" if is_data(address) else f"image {shown(address, 300)}"
    return "image"


def is_data(address: str) -> bool:
    """Return whether an address is a `data:` URI."""
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
        return source
    if isinstance(source, list | tuple) or hasattr(source, "__array__"):
        return _of_pixels(source)
    raise RequestError(f"it must be a path, a data: URI, bytes, an image of Pillow or an array, not {shown(source)}")


def refuse_large(content: bytes | bytearray | memoryview, most: int) -> bytes | bytearray | memoryview:
    """Return a file's content, of which no more than its first `most + 1` bytes need be there.

    Raises:
        RequestError: It has more than `most` bytes.
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
    head, comma, text = address.partition(",")
    kind, *others = head[5:].lower().split(";")
    if not comma or "base64" not in others:
        raise RequestError("it must be of the form data:image/png;base64,…")
    if kind.strip() and not kind.strip().startswith("image/"):
        raise RequestError(f"it holds {shown(kind.strip())}, which is no image")
    if len(text) > 2 * limits.bytes + 16:  # before anything is made of it; a line break may follow each few letters
        raise RequestError(f"it has more than {limits.bytes:,} bytes, the limit")
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"it is not base64: {one_line(error)}") from error
    return bytes(refuse_large(content, limits.bytes))


def _of_pixels(source: Any) -> Image.Image:
    try:
        pixels: npt.NDArray[Any] = np.asarray(source)
    except ValueError as error:
        raise RequestError("its rows are not of one length") from error
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise RequestError(f"pixels must be [H, W] or [H, W, 3], not {list(pixels.shape)}")
    if not np.issubdtype(pixels.dtype, np.integer):
        raise RequestError(f"pixels must be integers of 0 to 255, not {pixels.dtype}")
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 255):
        raise RequestError(f"pixels must be 0 to 255, not {pixels.min()} to {pixels.max()}")
    return Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))


def _opened(content: bytes, limits: ImageLimits) -> Image.Image:
    """Return an image whose size is known; its pixels are decoded when they are asked for."""
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
    return image


def _upright(image: Image.Image) -> Image.Image:
    if image.mode.startswith(_DEEP):
        raise RequestError(f"its pixels have more than 8 bits (mode {image.mode}): convert it")
    image.load()
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that cannot be read says nothing about the pixels
        turned = image
    return turned.convert("RGB")
