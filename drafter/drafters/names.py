"""Syntax of drafter names: `a+b` merges drafters, `kind:rest` makes one from what comes after the colon.

`auto:` takes all of the rest of a name: `,` separates the drafters among which one is chosen, and `+` binds tighter.
A method's own kinds may do so too, and say which drafters they are made of; see `Method`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from drafter.embedded import embedded_heads
from drafter.errors import LoadError
from drafter.plugins import methods, registered


def merged_names(name: str) -> list[str]:
    """Return the names of the drafters whose trees `name` merges; `name` alone if it is a path or merges none."""
    kind, _, rest = name.partition(":")
    if Path(name).exists() or ("+" not in kind and Path(rest or name).exists()):
        return [name]
    members = name.split("+")
    kinds = ["auto", *(kind for method in methods().values() for kind in method.whole)]
    take_all = tuple(f"{kind}:" for kind in kinds)
    last = next((place for place, member in enumerate(members) if member.startswith(take_all)), len(members))
    return [*members[:last], *(["+".join(members[last:])] if members[last:] else [])]


def kind_and_rest(name: str) -> tuple[str, str]:
    """Return what stands before and after the first colon; the kind is empty for a path or a name without colon."""
    kind, colon, rest = name.partition(":")
    return ("", name) if not colon or "/" in kind or Path(name).exists() else (kind, rest)


def candidates(rest: str) -> list[str]:
    """Split what follows `auto:` into the drafters among which one is chosen."""
    return rest.split(",")


def leaf_names(name: str) -> list[str]:
    """Return the drafters that a name is made of, each once."""
    members = merged_names(name)
    if len(members) == 1:
        kind, rest = kind_and_rest(name)
        parts = {"auto": candidates, **registered("parts")}
        members = parts[kind](rest) if kind in parts else members
        if members == [name] or not all(members):
            return [name]
    return list(dict.fromkeys(leaf for member in members for leaf in leaf_names(member)))


def check_name(name: str) -> None:
    """Raise `LoadError` unless one of `leaf_names` is a drafter's name, a path or may be a hub id."""
    kind, rest = kind_and_rest(name)
    kinds, without_weights = sorted(["auto", *registered("families")]), ["none", *registered("drafters")]
    heads = embedded_heads()
    if kind in kinds or "/" in name or Path(name).expanduser().exists() or name in ("auto", *without_weights, *heads):
        return
    known = ["auto", *without_weights, *heads, *(f"{one}:…" for one in kinds)]
    close = get_close_matches(f"{kind}:…" if kind else name, known, 1)
    use = f"use {', '.join(known)}, a draft head's folder or hub id, or several joined by '+'"
    hint = f"did you mean {close[0].replace('…', rest)}? ({use})" if close else use
    raise LoadError(f"no drafter {name!r}: {hint}")
