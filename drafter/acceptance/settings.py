"""Settings of verifiers. Nothing here imports torch, not even for type checkers: the command line runs such imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VerifierSettings:
    """Verifier, which decides which draft tokens become output.

    Args:
        name: `exact` gives the tokens of plain decoding. `fly`, `pad` and `typical` accept more, which changes the
            text; all of their output is marked.
        settings: Its own settings by name; `--verifier.NAME VALUE` sets one of them.
    """

    name: str = "exact"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
