"""Short texts with a record in each, made from a seed, and the schemas of the records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PEOPLE = ("Amira Haddad", "Tomas Novak", "Hana Sato", "Luis Romero", "Ingrid Olsen", "Kofi Mensah", "Maya Patel")
_CITIES = {"Bari": "Italy", "Graz": "Austria", "Gdansk": "Poland", "Lyon": "France", "Porto": "Portugal"}
_STREETS = ("Mill Lane", "Station Road", "Harbour Street", "Linden Avenue", "Castle Hill")
_JOBS = ("nurse", "carpenter", "translator", "surveyor", "baker")
_LANGUAGES = ("Arabic", "English", "French", "German", "Polish", "Spanish")
_PRODUCTS = ("garden chair", "desk lamp", "wool blanket", "tea kettle", "bookshelf", "bicycle pump")
_CURRENCIES = ("EUR", "GBP", "USD")
_SHIPPING = ("standard", "express", "pickup")
_TOPICS = ("Bread Baking", "Night Photography", "River Ecology", "Jazz Piano", "Roman History")
_EVENTS = ("concert", "lecture", "workshop", "exhibition")
_VENUES = ("Old Town Hall", "Riverside Theatre", "City Library", "Glass House")
_COMPONENTS = ("login", "payments", "search", "reports", "mobile")
_SEVERITIES = ("low", "medium", "high", "critical")
_FAULTS = (
    "the page stays white after the password is entered",
    "totals are rounded twice",
    "results of the last week are missing",
    "the export stops at row 500",
)


@dataclass(frozen=True)
class Task:
    """A text, the `kind` of its record, and the prompt that asks for it."""

    kind: str
    text: str

    @property
    def schema(self) -> dict[str, Any]:
        return SCHEMAS[self.kind]

    @property
    def prompt(self) -> str:
        keys = ", ".join(f'"{key}"' for key in self.schema["properties"])
        return f"Extract the {self.kind} from the text as JSON with the keys {keys}.\n\nText: {self.text}"


def tasks(count: int, seed: int = 0) -> list[Task]:
    """Return tasks of all kinds in turn; the same seed gives the same ones."""
    source, kinds = random.Random(seed), list(_WRITERS)
    return [Task(kind := kinds[place % len(kinds)], _WRITERS[kind](source)) for place in range(count)]


def _person(source: random.Random) -> str:
    city = source.choice(list(_CITIES))
    languages = " and ".join(source.sample(_LANGUAGES, 2))
    name, number, street = source.choice(_PEOPLE), source.randint(1, 99), source.choice(_STREETS)
    return (
        f"{name}, {source.randint(21, 68)}, works as a {source.choice(_JOBS)} and lives at {number} {street} in "
        f"{city}, {_CITIES[city]}. At home they speak {languages}. Write to {name.split()[0].lower()}@example.com."
    )


def _order(source: random.Random) -> str:
    items = " and ".join(
        f"{source.randint(2, 40)} pieces of {product} at {source.randint(3, 90)} each"
        for product in source.sample(_PRODUCTS, 2)
    )
    return (
        f"{source.choice(_PEOPLE)} has ordered {items}, priced in {source.choice(_CURRENCIES)}. Delivery is "
        f"{source.choice(_SHIPPING)}, by 2026-{source.randint(1, 12):02d}-{source.randint(1, 28):02d}, to "
        f"{source.choice(list(_CITIES))}."
    )


def _event(source: random.Random) -> str:
    speakers = " and ".join(source.sample(_PEOPLE, 2))
    return (
        f'The {source.choice(_EVENTS)} "{source.choice(_TOPICS)}" with {speakers} takes place at the '
        f"{source.choice(_VENUES)} in {source.choice(list(_CITIES))} on 2026-{source.randint(1, 12):02d}-"
        f"{source.randint(1, 28):02d} at {source.randint(9, 20)}:{source.choice(('00', '30'))}. There are "
        f"{source.randint(20, 300)} seats, and entry is {source.choice(('free', 'not free'))}."
    )


def _ticket(source: random.Random) -> str:
    name, parts = source.choice(_PEOPLE), " and ".join(source.sample(_COMPONENTS, 2))
    return (
        f"Ticket {source.randint(1000, 9999)}, reported by {name} ({name.split()[0].lower()}@example.com): "
        f"{source.choice(_FAULTS)}. It concerns {parts}, its severity is {source.choice(_SEVERITIES)}, and it "
        f"{source.choice(('can', 'cannot'))} be reproduced with version {source.randint(1, 9)}.{source.randint(0, 9)}."
    )


_WRITERS: dict[str, Callable[[random.Random], str]] = {
    "person": _person,
    "order": _order,
    "event": _event,
    "ticket": _ticket,
}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object as OpenAI's strict mode has it: all properties, and no others."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _list(items: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9999}
_DATE: dict[str, Any] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(
        name=_TEXT,
        age=_NUMBER,
        occupation=_TEXT,
        address=_object(number=_NUMBER, street=_TEXT, city=_TEXT, country=_TEXT),
        languages=_list(_one_of(*_LANGUAGES), 4),
        email=_TEXT,
    ),
    "order": _object(
        customer=_TEXT,
        items=_list(_object(product=_TEXT, quantity=_NUMBER, unit_price=_NUMBER), 4),
        currency=_one_of(*_CURRENCIES),
        shipping=_one_of(*_SHIPPING),
        delivery_date=_DATE,
        city=_TEXT,
    ),
    "event": _object(
        title=_TEXT,
        kind=_one_of(*_EVENTS),
        speakers=_list(_TEXT, 4),
        venue=_object(name=_TEXT, city=_TEXT),
        date=_DATE,
        start_time=_TEXT,
        seats=_NUMBER,
        free_entry={"type": "boolean"},
    ),
    "ticket": _object(
        number=_NUMBER,
        reporter=_object(name=_TEXT, email=_TEXT),
        components=_list(_one_of(*_COMPONENTS), 3),
        severity=_one_of(*_SEVERITIES),
        reproducible={"type": "boolean"},
        version=_TEXT,
    ),
}
