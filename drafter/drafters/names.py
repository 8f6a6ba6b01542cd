"""How drafters are named: `a+b` merges drafters, `kind:rest` makes one from what comes after the colon."""

from __future__ import annotations

from pathlib import Path


def merged_names(name: str) -> list[str]:
    """Return the names of the drafters whose trees `name` merges; `name` alone if it is a path or merges none."""
    if Path(name).exists() or Path(name.partition(":")[2] or name).exists():
        return [name]
    return name.split("+")


def kind_and_rest(name: str) -> tuple[str, str]:
    """Return what stands before and after the first colon; the kind is empty for a path or a name without colon."""
    kind, colon, rest = name.partition(":")
    return ("", name) if not colon or "/" in kind or Path(name).exists() else (kind, rest)
