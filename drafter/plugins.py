"""Registry of methods: a package with an object `METHOD`, in `drafter.methods` or an entry point of that group."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

GROUP = "drafter.methods"  # group of entry points, and the package of this project's own methods
Kind = Literal["drafters", "families", "heads", "verifiers", "layouts"]


@dataclass(frozen=True)
class Method:
    """The names that a method adds. Each value is a reference `package.module:name`, imported on use."""

    drafters: Mapping[str, str] = field(default_factory=dict)  # NAME: function of a `Loading` → `Drafter`
    families: Mapping[str, str] = field(default_factory=dict)  # NAME:REST: function of REST and a `Loading` → `Drafter`
    heads: Mapping[str, str] = field(default_factory=dict)  # subclass of `DraftHead` by its algorithm
    verifiers: Mapping[str, str] = field(default_factory=dict)  # subclass of `Verifier` by its name
    layouts: Mapping[str, str] = field(default_factory=dict)  # `Layout` of published heads by its name


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


def names(kind: Kind) -> list[str]:
    """Return the names that methods add, without importing anything."""
    return [name for method in methods().values() for name in getattr(method, kind)]


def resolved(kind: Kind) -> dict[str, Any]:
    """Import what methods add, and return it by name."""
    return {
        name: pkgutil.resolve_name(reference)
        for method in methods().values()
        for name, reference in getattr(method, kind).items()
    }
