"""The rooms of an engine: a new one is a line here."""

from __future__ import annotations

from typing import Any

from drafter.acceptance.guide import Guides
from drafter.engine.batch import BatchState
from drafter.parts.contract import Room
from drafter.parts.device import device_room
from drafter.parts.guide import guide_room
from drafter.parts.images import image_room
from drafter.parts.learning import RowTap, learning_room
from drafter.parts.logprobs import logprob_room
from drafter.parts.text import text_room


def rooms(tokenizer: Any, guides: Guides, state: BatchState, tap: RowTap | None, brought: int) -> tuple[Room, ...]:
    """Return the rooms in the order in which a row calls its parts: the text comes last, which tells the caller.

    Drafts of up to `brought` tokens may come from elsewhere.
    """
    return (
        image_room(state.base, state.set_shift),
        logprob_room,
        learning_room(tap, state.base, state.hidden_bytes, state.fetch_hidden),
        *([device_room(state.base.vocab_size, brought)] if brought else []),
        guide_room(guides),
        text_room(tokenizer),
    )
