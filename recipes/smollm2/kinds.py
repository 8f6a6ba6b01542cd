"""Prompts of kinds that an instruct model hardly writes itself: code, documents to rewrite, records, tools.

They are made of texts at hand: the functions of Python's standard library and what is written about them (PSF licence),
the problems of GSM8K's training split (MIT), and invented people and things. Each follows from a seed. Nothing here is
like what heads are measured on in `data/drafter-prompts` beyond its kind.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType

_MODULES = """
argparse ast asyncio.tasks base64 bisect bdb calendar cmd code codecs collections colorsys configparser contextlib copy
csv datetime decimal difflib dis doctest email.utils enum fileinput filecmp fnmatch fractions ftplib functools getpass
gettext glob gzip hashlib heapq hmac html http.client http.cookies imaplib inspect ipaddress json keyword linecache
locale logging mailbox mimetypes netrc ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil
platform plistlib poplib posixpath pprint profile pstats queue quopri random reprlib sched secrets selectors shelve
shlex shutil smtplib socket socketserver sqlite3 ssl stat statistics string stringprep subprocess sysconfig tabnanny
tarfile telnetlib tempfile textwrap threading timeit token tokenize trace traceback turtle types typing unittest.case
unittest.mock urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref webbrowser xml.dom.minidom
xml.etree.ElementTree xmlrpc.client zipfile zoneinfo
"""
_LEAST_PASSAGE, _MOST_PASSAGE = 250, 1_100
"""Characters of a text that is rewritten, so that its answer fits with it."""
_REWRITES = (
    "Rewrite the following text in simple words. Keep every fact.",
    "Correct the spelling and grammar of the following text, and change nothing else.",
    "Rewrite the text below in the past tense.",
    "Rewrite the following text as a list of short points.",
    "Summarize the following text in two sentences.",
    "Repeat the following text word for word, and write all headings in capitals.",
    "Turn the following text into questions and answers.",
    "Shorten the following text by half. Quote its most important sentence.",
    "Rewrite the text for a reader who is ten years old, sentence by sentence.",
    "Paraphrase the following passage.",
)
_PEOPLE = (
    "Nadia Karimi|Oliver Brandt|Chiara Conti|Samuel Osei|Elif Demir|Jonas Lind|Ana Pereira|Victor Dupont|Mei Tanaka"
)
_PLACES = "Rotterdam|Seville|Turku|Bergen|Leipzig|Cork|Ghent|Tartu|Zadar|Naples|Bristol|Aarhus"
_THINGS = "microscope|rowing boat|oak table|printer|violin|tent|coffee grinder|sewing machine|telescope|pair of boots"
_TRADES = "electrician|librarian|gardener|pharmacist|cook|teacher|pilot|plumber|journalist|optician"
_DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
_FORMS: tuple[tuple[str, str], ...] = (
    (
        "guest, hotel_city, nights, arrival, price",
        "{who} will arrive at the hotel in {where} on {day} and stay for {small} nights, at {number} dollars a night.",
    ),
    (
        "name, profession, age, home",
        "{who}, who is {age} years old, has worked as a {trade} in {where} since {year}.",
    ),
    (
        "product, seller, price, year",
        "For sale: a {thing} made in {year}. {who} of {where} asks {number} pounds for it, and delivers it on {day}.",
    ),
    (
        "sender, recipient, weight_kg, contents, destination",
        "The parcel from {who} to {other} weighs {small} kilograms. It holds a {thing} and goes to {where}.",
    ),
    (
        "speaker, topic, day, room, seats",
        "On {day}, {who} will speak about the life of a {trade} in room {small}. There are {number} seats.",
    ),
    (
        "complaint_by, product, bought, problem",
        "{who} bought a {thing} in {where} in {year} and writes that it broke after {small} days.",
    ),
)
_ASK = (
    'Extract the data from the text as JSON with the keys {keys}. Answer with JSON only.\n\nText: "{text}"',
    "Return a JSON object with {keys} for this text:\n\n{text}",
    "Read the text and fill in the fields {keys}. Use JSON.\n\n{text}",
    "{text}\n\nGive {keys} of the above as a JSON object.",
)
_CODE = (
    "Write a Python function `{name}{signature}`. {what}",
    'Complete this Python function:\n\n```python\ndef {name}{signature}:\n    """{what}"""\n```',
    "Explain step by step what this Python function does.\n\n```python\n{source}```",
    "Add comments to this Python function, and answer with the whole function.\n\n```python\n{source}```",
    "Write three unit tests for this Python function.\n\n```python\n{source}```",
    "Rename the function `{name}` to `my_{name}`, and answer with the whole function.\n\n```python\n{source}```",
    "Write this Python function again with type annotations.\n\n```python\n{source}```",
)
_CALLS = (
    "Answer with a call of one of these functions, as JSON:\n{schemas}\n\n{request}",
    "You can call these functions: {schemas}\n\n{request} Answer with the JSON of one call, its name and arguments.",
)


@dataclass(frozen=True)
class _Function:
    """A function of the standard library, with `what` its documentation says first."""

    name: str
    signature: str
    what: str
    source: str

    @property
    def parameters(self) -> list[str]:
        names = re.findall(r"(\w+)(?:=[^,)]*)?[,)]", self.signature)
        return [name for name in names if name != "self"]


def prompts(count: int, problems: Sequence[str], seed: int) -> list[tuple[str, str]]:
    """Return prompts of all kinds in turn, each with its kind.

    Args:
        count: How many.
        problems: Texts that may be rewritten, such as GSM8K's problems, several in one.
        seed: Other seeds give other prompts, some of which may repeat.
    """
    makers: dict[str, Callable[[random.Random], str]] = {
        "code": _code,
        "rewriting": lambda source: _rewriting(source, problems),
        "records": _record,
        "tools": _tools,
    }
    draws, kinds = random.Random(seed), list(makers)
    return [(kind := kinds[place % len(kinds)], makers[kind](draws)) for place in range(count)]


def _code(draws: random.Random) -> str:
    one = draws.choice(functions())
    return draws.choice(_CODE).format(name=one.name, signature=one.signature, what=one.what, source=one.source)


def _rewriting(draws: random.Random, problems: Sequence[str]) -> str:
    if draws.random() < 0.5:
        passage = "\n\n".join(draws.sample(problems, draws.randint(1, 3)))
    else:
        passage = draws.choice(passages())
    after, ask = draws.random() < 0.5, draws.choice(_REWRITES)
    if after:
        return f"{passage}\n\n{ask.replace('following text', 'text above').replace('below', 'above')}"
    return f"{ask}\n\n{passage}"


def _record(draws: random.Random) -> str:
    keys, text = draws.choice(_FORMS)
    who, other = draws.sample(_PEOPLE.split("|"), 2)
    filled = text.format(
        who=who,
        other=other,
        where=draws.choice(_PLACES.split("|")),
        day=draws.choice(_DAYS.split("|")),
        thing=draws.choice(_THINGS.split("|")),
        trade=draws.choice(_TRADES.split("|")),
        small=draws.randint(2, 30),
        age=draws.randint(19, 80),
        year=draws.randint(1960, 2025),
        number=draws.randint(40, 900),
    )
    return draws.choice(_ASK).format(keys=", ".join(f'"{key}"' for key in keys.split(", ")), text=filled)


def _tools(draws: random.Random) -> str:
    offered = draws.sample(functions(), draws.randint(1, 3))
    wanted = draws.choice(offered)
    schemas = json.dumps([_schema(one) for one in offered])
    values = ", ".join(f"{name} {draws.randint(1, 99)}" for name in wanted.parameters[:2])
    request = f"{wanted.what} Please do this with {values or 'the usual settings'}."
    return draws.choice(_CALLS).format(schemas=schemas, request=request)


def _schema(one: _Function) -> dict[str, object]:
    names = one.parameters
    fields = {name: {"type": "string", "description": f"The {name.replace('_', ' ')}."} for name in names}
    parameters = {"type": "object", "properties": fields, "required": names[:2]}
    return {"name": one.name, "description": one.what, "parameters": parameters}


@cache
def functions() -> tuple[_Function, ...]:
    """Return the documented functions of the standard library that are short enough to be quoted."""
    return tuple(sorted(set(_functions()), key=lambda one: (one.name, one.source)))


def _functions() -> Iterator[_Function]:
    for module in _modules():
        holders = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
        for holder in holders:
            for name, value in vars(holder).items():
                if not isinstance(value, FunctionType) or name.startswith("__") or not value.__doc__:
                    continue
                try:
                    source, signature = textwrap.dedent(inspect.getsource(value)), str(inspect.signature(value))
                except (OSError, TypeError, ValueError):
                    continue  # made at run time, or in C
                what = " ".join(inspect.cleandoc(value.__doc__).split("\n\n")[0].split())
                if 15 <= len(what) <= 200 and len(source) <= 900 and len(signature) <= 90:
                    yield _Function(name, signature, what.rstrip(".") + ".", source)


@cache
def passages() -> tuple[str, ...]:
    """Return the passages of prose in the standard library's documentation."""
    found = set()
    for module in _modules():
        documented = [value for value in vars(module).values() if inspect.isroutine(value) or inspect.isclass(value)]
        for document in (one.__doc__ for one in (module, *documented)):
            if not isinstance(document, str):
                continue  # a class may describe it by an attribute
            text = inspect.cleandoc(document)[:_MOST_PASSAGE].rsplit("\n\n", 1)[0]
            words = re.findall(r"[A-Za-z]{2,}", text)
            prose = sum(map(len, words)) >= 0.7 * len(text.replace(" ", "").replace("\n", "")) > 0
            if len(text) >= _LEAST_PASSAGE and prose and ">>>" not in text:
                found.add(text)
    return tuple(sorted(found))


@cache
def _modules() -> tuple[object, ...]:
    made = []
    for name in _MODULES.split():
        try:
            made.append(importlib.import_module(name))
        except ImportError:
            continue  # of another Python
    return tuple(made)
