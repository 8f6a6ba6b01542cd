"""JSON as the standard has it: Python alone would write NaN and infinities, which other readers refuse."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> str:
    """Return a value as compact JSON text.

    Raises:
        ValueError: It has a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
