"""Record of a measurement's environment: hardware, versions, commit, command line."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from drafter.source_commit import has_changes, source_commit
from drafter.target_model.model import BaseModel


def environment(base: BaseModel, command: str) -> dict[str, Any]:
    """Return the record that is stored with every measurement. `command` is the command line to repeat it."""
    return surroundings(base.device, command) | {
        "dtype": str(base.dtype).removeprefix("torch."),
        "attention": base.config._attn_implementation,
        "base": {
            "fingerprint": base.fingerprint,
            "type": base.config.model_type,
            "parameters": sum(parameter.numel() for parameter in base.model.parameters()),
        },
    }


def surroundings(device: torch.device, command: str) -> dict[str, Any]:
    """Return the part of the record that does not depend on a target model."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_folders(command),
        "commit": source_commit(),
        "uncommitted_changes": has_changes(),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpu": device_name(device) if device.type == "cuda" else None,
        },
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def without_folders(text: str) -> str:
    """Return a text whose paths mean something on other machines: from the working directory, or else below `~`."""
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/"), (tempfile.gettempdir(), "~/")):
        text = re.sub(rf"(?<![\w/.~-]){re.escape(str(folder))}/", short, text)
    return text


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def machine(record: dict[str, Any]) -> str:
    hardware = record["hardware"]
    return str(hardware["gpu"] or f"{hardware['processor']}, {hardware['cores']} cores")


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
