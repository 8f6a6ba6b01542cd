"""Exports draft heads in the layouts that vLLM reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from drafter.errors import LoadError
from drafter.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from drafter.heads.config import head_config
from drafter.heads.layouts import layouts
from drafter.heads.published import Layout, TargetOfExport
from drafter.heads.registry import HEADS


def export_head(source: Path, target: Path, base: TargetOfExport) -> None:
    """Convert a folder that `save_head` has written to the layout that vLLM reads, in an existing folder.

    Raises:
        LoadError: The layout cannot hold this algorithm or configuration.
    """
    saved = json.loads((source / CONFIG_FILE).read_bytes())
    layout, shape = exportable(saved["algorithm"], saved["head"])
    assert layout.export is not None
    config, tensors = layout.export(shape, load_file(source / WEIGHTS_FILE), base)
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / WEIGHTS_FILE, {"format": "pt"})
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def exportable(algorithm: str, fields: Mapping[str, Any]) -> tuple[Layout, Any]:
    """Return a head's export layout and its configuration.

    Raises:
        LoadError: The head cannot be exported.
    """
    exported = {one.algorithm: one for one in layouts() if one.export is not None}
    if algorithm not in exported:
        raise LoadError(f"heads of algorithm {algorithm!r} have no layout that others read; {', '.join(exported)} have")
    shape = head_config(algorithm, HEADS[algorithm].config_class, fields)
    exported[algorithm].check_exportable(shape)
    return exported[algorithm], shape
