from __future__ import annotations

import base64
import hashlib
import os
import random
import struct
import tracemalloc
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from drafter.errors import RequestError
from drafter.images.opening import (
    GivenImage,
    ImageLimits,
    given_images,
    image_digest,
    open_image,
    open_images,
    pixel_digest,
)
from tests.support.properties import examples

LIMITS = ImageLimits(bytes=1 << 20, pixels=1_000_000, images=4)
RED = Image.new("RGB", (3, 2), (255, 0, 0))


def file_of(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A grey PNG of this size whose pixels, all 0, take a few bytes."""
    packed = zlib.compressobj(9)
    rows = b"".join(packed.compress(bytes(width + 1)) for _ in range(height)) + packed.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", rows), (b"IEND", b"")]
    made = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


def refusal(source: Any, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as refused:
        open_image(source, limits)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    content = file_of(RED)
    path = tmp_path / "red.png"
    path.write_bytes(content)
    pixels = np.asarray(RED)
    sources = (
        *(path, str(path), content, bytearray(content), data_uri(content), data_uri(content, "")),
        *({"bytes": content, "path": None}, {"bytes": None, "path": str(path)}, {"bytes": content, "path": "gone.png"}),
        *(RED, RED.convert("RGBA"), pixels, pixels.tolist(), pixels.astype(np.int64)),
    )
    for source in sources:
        image = open_image(source, LIMITS)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), pixels)


def test_grey_pixels_and_palettes_become_colours() -> None:
    grey = np.array([[0, 128], [255, 7]], np.uint8)
    for source in (grey, grey[:, :, None], file_of(Image.fromarray(grey)), file_of(Image.fromarray(grey), "BMP")):
        np.testing.assert_array_equal(np.asarray(open_image(source, LIMITS)), np.stack([grey] * 3, axis=2))
    np.testing.assert_array_equal(np.asarray(open_image(file_of(RED, "GIF"), LIMITS)), np.asarray(RED))


def test_an_image_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    content = file_of(RED, exif=exif.tobytes())
    assert open_image(content, LIMITS).size == (2, 3)


def test_of_an_animation_the_first_image_is_read() -> None:
    content = file_of(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (3, 2), (0, 0, 255))])
    assert open_image(content, LIMITS).getpixel((0, 0)) == (255, 0, 0)


def test_what_is_no_image_is_named() -> None:
    assert "limit" in refusal(png(2000, 2000))
    bomb = png(8000, 8000)
    assert len(bomb) < LIMITS.bytes / 10
    assert "8,000 × 8,000 pixels, and 1,000,000 are the limit" in refusal(bomb)
    bitmap = file_of(RED, "BMP")
    bitmap = bitmap[:18] + struct.pack("<II", 30_000, 30_000) + bitmap[26:]
    assert "more than 1,000,000 pixels, the limit" in refusal(bitmap)  # by Pillow's own limit
    assert "damaged" in refusal(file_of(Image.effect_noise((64, 64), 90))[:-900])
    assert "SVG" in refusal(b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>')
    assert "SVG" in refusal(data_uri(b"<svg/>", "image/svg+xml"))
    assert "text/html" in refusal(data_uri(b"<html>", "text/html"))
    assert "not one of PNG, JPEG" in refusal(file_of(RED, "TIFF"))
    assert "not one of PNG, JPEG" in refusal(b"%PDF-1.7")
    assert "empty" in refusal(b"")
    assert "not base64" in refusal("data:image/png;base64,!!!!")
    assert "data:image/png;base64" in refusal("data:image/png,abc")
    assert "8 bits" in refusal(file_of(Image.new("I;16", (4, 4), 60_000)))
    assert "must be a path" in refusal(7)
    assert "not {'url': 'a'}" in refusal({"url": "a"})
    assert "[2, 2, 2]" in refusal(np.zeros((2, 2, 2), np.uint8))
    assert "0 to 255" in refusal(np.zeros((2, 2)))
    assert "0 to 255" in refusal(np.full((2, 2), 256))
    assert "one length" in refusal([[1, 2], [3]])
    assert "not of type float" in refusal([[1, 2.5]])
    assert "not of type bool" in refusal([[True]])
    assert "[1, 1, 1, 1" in refusal(np.ones([1] * 32, int).tolist())
    assert "0 to 255" in refusal([[10**30]])
    assert "200 times as long as wide" in refusal(png(1, 201))
    assert "200 times as long as wide" in refusal(Image.new("L", (402, 2)))
    assert open_image(png(200, 1), LIMITS).size == (200, 1)
    assert "no pixels" in refusal(np.zeros((0, 2, 3), np.uint8))


def test_files_are_read_only_by_their_paths(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no such file" in refusal(str(tmp_path / "pipe"))  # it would wait for ever
    assert "no such file" in refusal(str(tmp_path))
    assert "gone.png" in refusal("gone.png")
    for address in ("file:///etc/passwd", "file:/etc/passwd", "http://127.0.0.1/", "https://example.com/a.png"):
        assert "no address is fetched" in refusal(address)
    secret = tmp_path / "secret"
    secret.write_text("password")
    assert "password" not in refusal(str(secret))


def test_too_large_a_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    assert "1,048,576 bytes, the limit" in refusal(str(path))
    assert "bytes, the limit" in refusal(bytes(LIMITS.bytes + 1))
    assert "bytes, the limit" in refusal("data:image/png;base64," + "A" * (4 << 20))
    asked = []

    def fetch(address: str, most: int) -> bytes:
        asked.append((address, most))
        return file_of(RED)

    assert open_image("s3://bucket/red.png", LIMITS, fetch=fetch).size == RED.size
    assert asked == [("s3://bucket/red.png", LIMITS.bytes)]


@pytest.mark.filterwarnings("ignore")  # pytest shows all, whatever is set
def test_large_exif_data_and_many_passes_do_no_harm() -> None:
    grey = Image.new("L", (8, 8), 9)
    huge = png(2, 2, (b"eXIf", b"MM\0*\0\0\0\x08" + struct.pack(">H", 65535) + random.Random(1).randbytes(900_000)))
    assert open_image(huge, LIMITS).size == (2, 2)
    text = png(2, 2, (b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20), 9)))
    assert "damaged: Decompressed data too large" in refusal(text)
    jpeg = file_of(grey, "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    assert "passes" in refusal(jpeg[:-2] + scan * 70 + jpeg[-2:])
    assert open_image(jpeg, LIMITS).size == (8, 8)
    assert open_image(jpeg + b"\xff\xda" * 70, LIMITS).size == (8, 8)  # a film behind it, as telephones write
    several = file_of(grey, "MPO", save_all=True, append_images=[grey], progressive=True)
    end = several.index(b"\xff\xd9\xff\xd8")
    assert open_image(several, LIMITS).size == (8, 8)
    assert "passes" in refusal(several[:end] + scan * 70 + several[end:])


def test_a_small_source_takes_little_memory() -> None:
    small = data_uri(file_of(RED))
    for source, why in (
        ([["a" * 100_000], *[["b"]] * 10_000], "not of type str"),
        (small + " " * 900_000, None),
        ("data:" + ";" * 900_000 + "base64,AA", "of the form data:image"),
    ):
        tracemalloc.start()
        if why is None:
            assert open_image(source, LIMITS).size == RED.size
        else:
            assert why in refusal(source)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 4 << 20, str(source)[:20]


def test_limits_are_those_of_all_images_of_a_prompt() -> None:
    square = given_images([png(700, 700)] * 2, LIMITS)
    assert [image.size for image in open_images(square, LIMITS)] == [(700, 700)] * 2
    torn = GivenImage(png(700, 700)[:60], "torn")  # which is not decoded before the sizes of all are known
    with pytest.raises(RequestError, match=r"^image: up to this one the prompt's images have 1,470,000 pixels"):
        open_images([torn, *square], LIMITS)
    with pytest.raises(RequestError, match=r"up to this one the prompt's images have more than 1,048,576 bytes"):
        given_images([bytes(600_000)] * 2, LIMITS)
    with pytest.raises(RequestError, match="has 5 images, and may have up to 4"):
        given_images([RED] * 5, LIMITS)


def test_a_digest_of_strips_is_that_of_all_pixels() -> None:
    image = Image.effect_noise((3000, 700), 60).convert("RGB")
    pixels = image.convert("RGBA")
    assert pixel_digest(image) == hashlib.sha256(b"3000x700:" + pixels.tobytes()).digest()


@examples(60)
@given(st.sampled_from(("PNG", "JPEG", "WEBP", "GIF", "BMP")), st.integers(0, 2**32))
def test_a_damaged_file_is_an_image_or_an_error(kind: str, seed: int) -> None:
    random_ = random.Random(seed)
    content = bytearray(file_of(Image.effect_noise((24, 16), 60), kind))
    for _ in range(random_.randint(1, 12)):
        content[random_.randrange(len(content))] = random_.randrange(256)
    del content[random_.randint(len(content) // 2, len(content)) :]
    with suppress(RequestError):
        assert open_image(bytes(content), LIMITS).mode == "RGB"


def test_equal_files_have_one_digest() -> None:
    content = file_of(RED)
    assert image_digest(content, LIMITS) == image_digest(data_uri(content), LIMITS)
    assert image_digest(content, LIMITS) != image_digest(file_of(RED.transpose(Image.Transpose.ROTATE_90)), LIMITS)
    assert image_digest(np.asarray(RED), LIMITS) == image_digest(RED, LIMITS)
    assert image_digest(RED, LIMITS) != image_digest(RED.resize((2, 3)), LIMITS)
