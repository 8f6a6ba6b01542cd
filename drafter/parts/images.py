"""The images of a row's prompt, or what else a target model that sees makes of a prompt before it reads it."""

from __future__ import annotations

from collections.abc import Callable

from drafter.engine.handle import Handle
from drafter.errors import RequestError
from drafter.parts.contract import NewTokens, Room, Row, RowPart
from drafter.prompt import Prompt
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import Features, Sight
from drafter.target_model.towers import InPieces


class ImagePart(RowPart):
    """Computes the features of a prompt, piece by piece, and keeps them until it has been read.

    Args:
        on_features: Gets the slot and the features, once they are there.
    """

    apart = True

    def __init__(self, sight: Sight, prompt: Prompt, on_features: Callable[[int, Features], object]) -> None:
        self._sight, self._prompt, self._on_features = sight, prompt, on_features
        self._work: InPieces[Features] | None = None

    def enter(self, row: Row, slot: int, tokens: int) -> bool:
        if self.features is not None:
            return True
        if self._work is None:
            self._work = self._sight.in_pieces(self._prompt, row.handle.request.salt, tokens)
        if not self._work.go_on():
            return False
        work, self._work = self._work, None
        self.features = work.result()
        self.borders = self.features.borders
        self._on_features(slot, self.features)
        return True

    def after_step(self, row: Row, new: NewTokens) -> None:
        self.features = None

    def leave(self, row: Row, slot: int | None) -> None:
        self.features = None
        if self._work is not None:
            self._work.close()
            self._work = None


def image_room(base: BaseModel, on_features: Callable[[int, Features], object]) -> Room:
    """Return what makes the parts of prompts that the target model reads by features, and refuses what it cannot."""

    def room(handle: Handle) -> ImagePart | None:
        prompt, sight = handle.request.prompt, base.sight
        assert isinstance(prompt, Prompt)
        if sight is not None:
            sight.refuse(prompt)
            return ImagePart(sight, prompt, on_features) if sight.reads(prompt) else None
        if prompt.inputs:
            raise RequestError(f"the prompt has images, and {base.blind}: leave them out, or use a model that sees")
        return None

    return room
