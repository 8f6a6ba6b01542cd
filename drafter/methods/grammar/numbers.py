"""Writes bounds of numbers as parts that llguidance follows exactly.

llguidance makes a regular expression of two bounds. It is right where the lower one is included, and the upper one is
excluded or a whole number; but it lacks the texts that are beginnings of the upper one (0.2 below 0.25), and takes 0
for a number above it. So an interval is written as such a part, with the texts that it lacks beside it.

Bounds are those of validators, which compare floats: a text just below an exclusive bound is read as the bound itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

TINIEST = 1e-20
"""The least number above 0 within bounds, where numbers have no exponents."""
_LARGEST = 2.0**63 - 1024  # the largest float that llguidance can hold as an integer
_EXACT = 2.0**53  # floats up to here are exact for all whole numbers
LARGEST_MULTIPLE = 10_000
"""In units of the last decimal: an automaton has a state for each remainder."""
_MOST_DIGITS = 15  # digits of a multiple, so that all are exact
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MIRRORED = {
    "minimum": "maximum",
    "maximum": "minimum",
    "exclusiveMinimum": "exclusiveMaximum",
    "exclusiveMaximum": "exclusiveMinimum",
}
BOUNDS = (*_MIRRORED, "multipleOf")

Part = dict[str, Any]


def with_parts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose bounds of numbers are parts, beside all else that it says."""
    given = schema.get("type", _TYPES)
    kinds = [given] if isinstance(given, str) else list(given)
    numeric = [one for one in kinds if one in ("number", "integer")]
    if not numeric or not schema.keys() & {*BOUNDS} or schema.keys() & {"const", "enum"}:
        return dict(schema)
    rest = {name: value for name, value in schema.items() if name not in BOUNDS}
    found: list[Any] = [*parts(schema, whole="number" not in numeric)]
    if others := [one for one in kinds if one not in numeric]:
        found.append({"type": others})
    return {**rest, "allOf": [*rest.get("allOf", []), {"anyOf": found or [False]}]}


def parts(schema: Mapping[str, Any], *, whole: bool) -> list[Part]:
    """Return schemas of which each number within a schema's `BOUNDS` meets one, and no other number does.

    Args:
        whole: The schema allows whole numbers alone.
    """
    bounds = {name: schema[name] for name in _MIRRORED if name in schema}
    low, high = _least(bounds), -_least(_mirrored(bounds))
    multiple = Fraction(str(schema["multipleOf"])) if "multipleOf" in schema else None
    if whole:
        return _whole(low, high, multiple)
    if multiple and multiple.denominator == 1:  # beyond, a float next to a multiple is none
        return _whole(max(low, -_EXACT), min(high, _EXACT), multiple)
    if multiple:
        most = 10.0 ** (_MOST_DIGITS - max(_decimals(multiple)))
        low, high = max(low, -most), min(high, most)
    found = _from_zero(max(low, TINIEST) if low > 0 else 0.0, high)
    found += [_mirrored(one) for one in _from_zero(max(-high, TINIEST), -low)]
    return found if multiple is None else [one for part in found for one in _multiples(part, multiple)]


def can_follow(multiple: float) -> bool:
    """Return whether multiples of a number can be written."""
    exact = Fraction(str(multiple))
    return (
        len(_decimals(exact)) <= _MOST_DIGITS
        and all(_coefficient(exact, places) <= LARGEST_MULTIPLE for places in _decimals(exact))
        and all(
            _as_read(_step(exact, places)) == _shortest(_coefficient(exact, places), places)
            for places in _decimals(exact)
        )
    )


def _mirrored(part: Mapping[str, Any]) -> Part:
    """Return the part of the numbers of opposite sign."""
    signed = {_MIRRORED[name]: -value for name, value in part.items() if name in _MIRRORED}
    kept = {name: value for name, value in part.items() if name in ("type", "multipleOf")}
    return kept | signed | ({"enum": [-one for one in part["enum"]]} if "enum" in part else {})


def _least(bounds: Mapping[str, Any]) -> float:
    """Return the least float that the lower bounds allow."""
    least = -math.inf
    if "minimum" in bounds:
        least = _rounded_up(bounds["minimum"])
    if "exclusiveMinimum" in bounds:
        bound = _rounded_up(bounds["exclusiveMinimum"])
        least = max(least, math.nextafter(bound, math.inf) if bound == bounds["exclusiveMinimum"] else bound)
    return least


def _rounded_up(number: float) -> float:
    """Return the least float that is not less: a whole number may be none."""
    try:
        nearest = float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    return nearest if nearest >= number else math.nextafter(nearest, math.inf)


def _whole(low: float, high: float, multiple: Fraction | None) -> list[Part]:
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if low > high:  # also where a bound is beyond all floats
        return []
    least, most = math.ceil(low), math.floor(high)
    part: Part = {"type": "integer", "minimum": least, "maximum": most}
    if least > most:
        return []
    # The whole multiples of a fraction in its lowest terms are those of its numerator.
    return [part if multiple is None else {**part, "multipleOf": multiple.numerator}]


def _from_zero(low: float, high: float) -> list[Part]:
    """Return the parts of the numbers from `low`, which is not negative, to `high`, both included."""
    number = {"type": "number"}
    if low > min(high, _LARGEST):
        return []
    low, high = _readable(low, math.inf), high if math.isinf(high) else _readable(min(high, _LARGEST), 0.0)
    if math.isinf(high):
        return [{**number, "minimum": _to_be_read(low)}]
    if low > high:
        return []
    found: list[Part] = []
    whole, digits = math.floor(high), format(Decimal(repr(high)), "f")
    if low < high and whole == high:
        return [{**number, "minimum": _to_be_read(low), "maximum": whole}]
    if low < high:
        found.append({**number, "minimum": _to_be_read(low), "exclusiveMaximum": _to_be_read(high)})
    decimals = len(digits.partition(".")[2])
    beginnings = {float(digits[: len(digits) - left]) for left in range(max(decimals, 1))}
    found.append({**number, "enum": [_to_be_read(one) for one in sorted(beginnings) if low <= one <= high]})
    if low <= whole and high < whole + 0.1:  # 3.0 is a beginning of 3.05, and no other text of 3 has a decimal
        found.append({**number, "minimum": whole, "exclusiveMaximum": round(whole + 0.1, 1), "multipleOf": 0.1})
    return found


def _readable(number: float, towards: float) -> float:
    """Return the next float, in a direction, that llguidance can be told."""
    while _to_be_read(number) is None:
        number = math.nextafter(number, towards)
    return number


def _to_be_read(number: float) -> float | None:
    """Return the number whose text llguidance reads as `number`; None if there is none.

    Its JSON parser rounds twice where there is a fraction: the digits, and their quotient by a power of ten.
    """
    if number.is_integer():
        return int(number)
    below = above = number
    for _ in range(4):
        for one in (below, above):
            if _read(one) == number:
                return one
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
    return None


def _read(number: float) -> float:
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    power, whole = float(f"1e{abs(int(exponent))}"), float(int("".join(map(str, digits))))
    return whole * power if int(exponent) >= 0 else whole / power


def _multiples(part: Part, multiple: Fraction) -> list[Part]:
    """Return a part's multiples of a number, which llguidance reads with a fixed number of decimals or none."""
    if "enum" in part:
        values = [one for one in part["enum"] if Fraction(repr(one)) % multiple == 0]
        return [{**part, "enum": values}] if values else []
    return [{**part, "multipleOf": _step(multiple, places)} for places in _decimals(multiple)]


def _decimals(multiple: Fraction) -> range:
    """Return the numbers of decimals that multiples may have."""
    places = 0
    while (multiple * 10**places).denominator != 1:
        places += 1
    return range(places + 1)


def _coefficient(multiple: Fraction, places: int) -> int:
    """Return the least multiple with so many decimals, in units of the last one."""
    scaled: int = multiple.numerator * 10**places
    return scaled // math.gcd(scaled, multiple.denominator)


def _step(multiple: Fraction, places: int) -> float:
    return float(Fraction(_coefficient(multiple, places), 10**places))


def _shortest(coefficient: int, places: int) -> tuple[int, int]:
    while places and coefficient % 10 == 0:
        coefficient, places = coefficient // 10, places - 1
    return coefficient, places


def _as_read(step: float) -> tuple[int, int]:
    """Return the coefficient and decimals that llguidance reads: it multiplies by ten, and rounding may add up."""
    places = 0
    while not step.is_integer() and places < 20:
        step, places = step * 10.0, places + 1
    return _shortest(int(step), places)
