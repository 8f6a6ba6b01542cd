"""Registry of methods: a package with an object `METHOD`, in `drafter.methods` or an entry point of that group."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

GROUP = "drafter.methods"  # group of entry points, and the package of this project's own methods
Kind = Literal["drafters", "families", "heads", "verifiers", "layouts", "guides"]
Trait = Literal["parts", "models", "files", "automatic"]
Automatic = Literal["merged", "beside", "alone"]
"""A drafter's part in `auto`: on a CPU beside the shipped head, and also merged with it, or only beside it; or on a GPU
instead of a head where none ships."""


@dataclass(frozen=True)
class Method:
    """The names that a method adds. Each reference is `package.module:name`, imported on use.

    The traits are known without such an import: of families `parts`, `models` and `files`, of drafters `automatic`.
    """

    drafters: Mapping[str, str] = field(default_factory=dict)  # NAME: function of a `Loading` → `Drafter`
    families: Mapping[str, str] = field(default_factory=dict)  # NAME:REST: function of REST and a `Loading` → `Drafter`
    heads: Mapping[str, str] = field(default_factory=dict)  # subclass of `DraftHead` by its algorithm
    verifiers: Mapping[str, str] = field(default_factory=dict)  # subclass of `Verifier` by its name
    layouts: Mapping[str, str] = field(default_factory=dict)  # `Layout` of published heads by its name
    guides: Mapping[str, str] = field(default_factory=dict)  # function that makes `Guides`; see `FirstGuides`
    parts: Mapping[str, Callable[[str], list[str]]] = field(default_factory=dict)  # REST → drafters that it is made of
    whole: tuple[str, ...] = ()  # families whose REST is all that follows in a name, `+` included
    models: Mapping[str, Callable[[str], str]] = field(default_factory=dict)  # REST → its model's folder or hub id
    files: Mapping[str, str] = field(default_factory=dict)  # how the file that REST names is made
    automatic: Mapping[str, Automatic] = field(default_factory=dict)


@cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name. Those in `drafter.methods` need no entry points, so a bare checkout has them too."""
    own = pkgutil.resolve_name(GROUP)
    found: dict[str, Method] = {
        one.name: pkgutil.resolve_name(f"{GROUP}.{one.name}:METHOD") for one in pkgutil.iter_modules(own.__path__)
    }
    for entry in entry_points(group=GROUP):
        if not entry.value.startswith(f"{GROUP}."):
            found[entry.name] = entry.load()
    return found


def resolved(kind: Kind) -> dict[str, Any]:
    """Import what methods add, and return it by name."""
    return {name: pkgutil.resolve_name(reference) for name, reference in registered(kind).items()}


def registered(kind: Kind | Trait) -> dict[str, Any]:
    """Return what methods add by name, without importing anything."""
    return {name: value for method in methods().values() for name, value in getattr(method, kind).items()}
