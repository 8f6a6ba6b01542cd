"""Formats of texts at their limits of length and shape."""

from __future__ import annotations

import datetime
import ipaddress
import uuid
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import AnyUrl, TypeAdapter

from drafter.methods.grammar.formats import FORMATS
from tests.methods.grammar.test_numbers import accepts

_BYTES = LLTokenizer("byte")
_LABEL = "a" * 63
_TYPES: dict[str, Any] = {
    "date": datetime.date,
    "date-time": datetime.datetime,
    "date-time-local": datetime.datetime,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": AnyUrl,
    "uuid": uuid.UUID,
}
CASES: dict[str, tuple[list[str], list[str]]] = {
    "email": (
        ["a@b.co", "user+tag@example.com", "o'neil@x.io", f"{'x' * 64}@example.com", f"a@{'.'.join([_LABEL] * 3)}.com"],
        [f"{'x' * 65}@example.com", f"a@{'a.' * 130}com", ".a@b.co", "a..b@c.co", "a@b", "a@-b.co", f"a@{_LABEL}a.com"],
    ),
    "hostname": (
        ["a", _LABEL, f"{'.'.join([_LABEL] * 3)}.{'a' * 61}", "a-b.c", "a--b", "1.2", "abc-d", "a-b-c-d-e"],
        [f"{_LABEL}a", f"{'.'.join([_LABEL] * 3)}.{'a' * 62}", "-a", "a-", "ab--c", "a_b", "a1--x", "ab-", ""],
    ),
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["256.1.1.1", "01.1.1.1", "1.1.1"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "::f:1.2.3.4"],
        ["1:2:3:4:5:6:7", "1::2::3", "12345::", "fe80::1%eth0", ":::", "::1.2.3.256", "1:2:3:4:5:6:7:8:9"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "123e4567-e89b"]),
    "duration": (
        ["P1Y2M3DT4H5M6S", "PT0S", "P4W", "P1YT1H", "PT1H30M", "P2D", "P99999999W"],
        ["P", "PT", "P1Y2W", "P1D2H", "PT1.5S", "P1Y3D", "PT1H3S"],
    ),
    "date": (["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01"]),
    "date-time": (
        ["2024-02-29T23:59:59Z", "2024-02-29T23:59:59+23:59", "2024-02-29T23:59:59.5-00:00"],
        ["2024-02-29T23:59:60Z", "2024-02-29T23:59:59+24:00", "2024-02-29T23:59:59"],
    ),
    "date-time-local": (["2024-02-29T23:59:59"], ["2024-02-29T23:59:59Z"]),
    "time": (["12:00:00Z", "12:00:00+05:30"], ["12:00:00", "24:00:00Z"]),
    "uri": (
        ["http://a.b/c?d#e", "mailto:a@b.co", "urn:isbn:1", "https://u:p@host:80/x%20y", "http://[::1]:8/", "tel:+1-2"],
        ["http://a:99999", "//a", "http://a b", "http://a/%zz", "a"],
    ),
}


@pytest.mark.parametrize("form", CASES)
def test_a_format_at_its_limits(form: str) -> None:
    schema = {"type": "string", "allOf": list(FORMATS[form])}
    grammar = LLMatcher(_BYTES, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    taken, refused = CASES[form]
    assert [one for one in taken if not accepts(grammar, f'"{one}"')] == []
    assert [one for one in refused if accepts(grammar, f'"{one}"')] == []
    for one in taken if form in _TYPES else ():
        TypeAdapter(_TYPES[form]).validate_json(f'"{one}"')
