"""Smaller language models draft, alone (SpecInfer, arXiv 2305.09781) or one above another (HSD, arXiv 2510.19705)."""

from pathlib import Path

from drafter.plugins import Method


def model_and_device(rest: str) -> tuple[str, str | None]:
    """Split what follows `model:`, `NAME@DEVICE`, into a path or hub id and a device; None without a device."""
    name, at, device = rest.rpartition("@")
    return (rest, None) if not at or Path(rest).exists() else (name, device)


def stack_levels(rest: str) -> list[str]:
    """Split what follows `stack:` into levels, from the lowest on."""
    return rest.split(">")


METHOD = Method(
    families={
        "model": "drafter.methods.draft_models.drafter:load_model_drafter",
        "stack": "drafter.methods.draft_models.drafter:load_stack",
    },
    parts={"stack": stack_levels},
    whole=("stack",),
    models={"model": lambda rest: model_and_device(rest)[0]},
)
