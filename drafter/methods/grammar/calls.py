"""The grammar of an output with calls of functions, in llguidance's variant of Lark's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from drafter.calls import Calls
from drafter.errors import RequestError

_OBJECTS = r"\{\"(name\": \"|type\": \"function)"
"""How a call in the place of a text begins. Some models write a type first, which the calls here have not."""


def calls_grammar(calls: Calls, added: Mapping[str, int], embedded: Callable[[str], str]) -> str:
    """Return the grammar of `calls`.

    Args:
        added: Tokens that no text of a grammar matches, by their text, without those that end an output.
        embedded: Gives the text that stands for a JSON schema in a grammar, or raises a `RequestError` about it.

    Raises:
        RequestError: The schema of a function cannot be followed. It names the function.
    """
    form = calls.form
    rules = []
    for place, (name, schema) in enumerate(calls.functions):
        try:
            text = embedded(schema)
        except RequestError as error:
            what = re.sub(r"^structured_outputs\.json:? *", "", str(error))
            raise RequestError(f"structured_outputs.calls: arguments of the function {name!r}: {what}") from error
        rules += [f"call{place}: {_literal(form.head(name), added)} arguments{place} {_literal('}', added)}"]
        rules += [f"arguments{place}: %json {text}"]
    rules.append("call: " + " | ".join(f"call{place}" for place in range(len(calls.functions))))
    more = ""
    if calls.several and form.between is not None:
        more = f" ({_literal(form.between, added)} call)*"
    rules.append(f"calls: {_literal(form.first, added)} call{more} {_literal(form.last, added)}")
    return "\n".join([_start(calls, added), *rules, *_texts(calls, added, embedded)])


def _start(calls: Calls, added: Mapping[str, int]) -> str:
    """Return the rule of the whole output: the calls, and what may be before or instead of them."""
    form = calls.form
    marked = f"{_literal(form.marker, added)} calls".strip()
    if calls.otherwise is None:
        return f"start: {'calls' if form.bare else marked}"
    if calls.otherwise:
        return f"start: answer | {marked}"
    if form.bare:
        return f"start: answer | calls | {marked}" if form.marker else "start: answer | calls"
    return f"start: answer | before {f'TEXT? {marked}' if form.marker in added else 'marker calls'}"


def _texts(calls: Calls, added: Mapping[str, int], embedded: Callable[[str], str]) -> list[str]:
    """Return the rules of what is no call."""
    form = calls.form
    if calls.otherwise is None:
        return []
    if calls.otherwise:
        return [f"answer: %json {embedded(calls.otherwise)}"]
    rules = ["answer: before TEXT?", "ANY: /(?s:.+)/"]
    others = ",".join(str(token) for name, token in added.items() if name != form.marker)
    rules.append(f"before: (TEXT? <[{others}]>)*" if others else 'before: ""')
    if form.bare:
        return [*rules, f"TEXT: ANY & ~(/{_OBJECTS}/ ANY?)"]
    if form.marker in added:
        return [*rules, "TEXT: ANY"]
    marker = json.dumps(form.marker, ensure_ascii=False)
    rules += [f"TEXT: ANY & ~(ANY? {marker} ANY?)", f"MARKED: ANY? {marker}"]
    return [*rules, "marker[lazy]: MARKED"]  # lazy: it ends where it first can


def _literal(text: str, added: Mapping[str, int]) -> str:
    """Return a text in the notation of a grammar, in which added tokens are tokens."""
    names = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(
        f"<[{added[one]}]>" if one in added else json.dumps(one, ensure_ascii=False) for one in parts if one
    )
