"""Formats of texts, as what RFCs and Pydantic both accept, those that say nothing, and what patterns may have.

llguidance's own allow the 29th of February in every year, second 60 in every minute, and names of any length.
"""

from __future__ import annotations

import re
from typing import Any

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]{1,9})?"
_ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_OF_DAY = "T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
_DAYS = f"[0-9]{{1,8}}D(?:{_OF_DAY})?"
_MONTHS = f"[0-9]{{1,6}}M(?:{_DAYS}|{_OF_DAY})?"
_YEARS = f"[0-9]{{1,6}}Y(?:{_MONTHS}|{_OF_DAY})?"
_DURATION = f"P(?:{_YEARS}|{_MONTHS}|{_DAYS}|{_OF_DAY}|[0-9]{{1,8}}W)"

# Up to 63 letters, digits and hyphens, without hyphens at the ends or at the third and fourth place (RFC 5890).
_LABEL = (
    "(?:[A-Za-z0-9](?:[A-Za-z0-9-]?[A-Za-z0-9]|[A-Za-z0-9-]{2}[A-Za-z0-9])?"
    "|[A-Za-z0-9][A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])"
)
_TOP = "[A-Za-z](?:[A-Za-z0-9]{0,61}[A-Za-z])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+{_TOP}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:{})".format(
    "|".join(
        [
            f"(?:{_GROUP}:){{6}}{_LAST}",
            *(
                f"(?:(?:{_GROUP}:){{0,{before - 1}}}{_GROUP})?::(?:{_GROUP}:){{{5 - before}}}{_LAST}"
                if before
                else f"::(?:{_GROUP}:){{5}}{_LAST}"
                for before in range(6)
            ),
            f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
            f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
        ]
    )
)
_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_IN_PATH = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})"
_NAME = r"(?:[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?\.)*[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?\.?"
_USER = f"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPED})*@"
_HOST = rf"(?:{_USER})?(?:{_NAME}|{_IPV4}|\[{_IPV6}\])(?::{_PORT})?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_HOST})?(?:/{_IN_PATH}*)*|/?{_IN_PATH}+(?:/{_IN_PATH}*)*)"
    rf"(?:\?(?:{_IN_PATH}|[/?])*)?(?:#(?:{_IN_PATH}|[/?])*)?"
)


def _whole(pattern: str) -> tuple[dict[str, Any], ...]:
    return ({"pattern": f"^(?:{pattern})$"},)


FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "date-time": _whole(f"{_DATE}T{_CLOCK}{_ZONE}"),
    "date": _whole(_DATE),
    "time": _whole(f"{_CLOCK}{_ZONE}"),
    "duration": _whole(_DURATION),
    "email": (*_whole(_EMAIL), {"pattern": "^[^@]{1,64}@"}, {"maxLength": 254}),
    "hostname": (*_whole(rf"{_LABEL}(?:\.{_LABEL})*"), {"maxLength": 253}),
    "ipv4": _whole(_IPV4),
    "ipv6": _whole(_IPV6),
    "uri": _whole(_URI),
    "uuid": _whole(_UUID),
    "date-time-local": _whole(f"{_DATE}T{_CLOCK}"),
    "time-local": _whole(_CLOCK),
    # Pydantic's
    **{
        f"uuid{version}": _whole(f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}")
        for version in range(1, 9)
    },
    "ipvanyaddress": _whole(f"{_IPV4}|{_IPV6}"),
    "ipv4interface": _whole(f"{_IPV4}/(?:3[0-2]|[12]?[0-9])"),
    "ipv6interface": _whole(f"{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"),
}
"""The formats that are followed: schemas that all hold."""

NOT_FOLLOWED = frozenset(
    ("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer")
) | {"uri-reference", "uri-template"}
"""Formats of JSON Schema that a validator may check. Any other is an annotation."""


_QUANTIFIER = r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}"
_UNSUPPORTED = (
    (r"\(\?<?[=!]", "look-around"),
    (r"\\(?:[1-9]|k<)", "a back-reference"),
    (r"\\[bB]", "a word boundary"),
    (r"\(\?(?![:iP<])", "an inline flag other than (?i)"),
    (r"\\x\{", r"\x{…}, for which \u{…} is standard,"),
    (rf"(?:{_QUANTIFIER})(?:[*+]|\{{[0-9])", "a repetition of a repetition"),
)
_TOKEN = re.compile(
    "|".join(f"(?P<u{index}>{one})" for index, (one, _) in enumerate(_UNSUPPORTED)) + r"|\\.|(?P<open>\[\^?\]?)|.",
    re.DOTALL,
)
_IN_CLASS = re.compile(r"(?P<set>\[|&&|--|~~)|\\.|(?P<close>\])|.", re.DOTALL)


def pattern_problem(pattern: Any) -> str | None:
    """Return what a regular expression has that llguidance cannot follow or reads unlike ECMA-262; None if nothing."""
    if not isinstance(pattern, str):
        return "a pattern must be a text"
    place, inside = 0, False
    while place < len(pattern):
        found = (_IN_CLASS if inside else _TOKEN).match(pattern, place)
        assert found is not None  # each ends in a dot
        kind, place = found.lastgroup, found.end()
        if kind == "set":
            return f"a pattern with {found.group()} inside of brackets is not supported: put \\ before each of it"
        if kind in ("open", "close"):
            inside = kind == "open"
        elif kind is not None:
            return f"a pattern with {_UNSUPPORTED[int(kind[1:])][1]} is not supported: write it without"
    return None
