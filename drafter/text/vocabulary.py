"""What tells tokenisers apart: token ids mean the same wherever the vocabulary is the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 16 hex digits for a tokeniser's vocabulary: its tokens, added ones included, and their ids."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]
