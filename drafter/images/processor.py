"""A prompt of messages and images, as the target model's own processor of transformers writes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL.Image import Image

from drafter.prompt import Prompt
from drafter.text.conversation import Conversation, Messages


class ImageProcessor:
    """Makes prompts of messages and images. It needs no weights."""

    tokenizer: Any

    def encode(
        self,
        asked: Conversation | Messages,
        images: Sequence[Image] = (),
        *,
        special_tokens: bool = False,
        max_length: float = math.inf,
        now: datetime | None = None,
    ) -> Prompt:
        """Return the prompt of a chat whose parts `{"type": "image"}` are the `images` (RGB), in order.

        Raises:
            RequestError: The template takes no such messages, there are more or fewer images than parts, or the
                processor cannot take one.
        """
        raise NotImplementedError


def load_processor(
    name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> ImageProcessor | None:
    """Load the processor of a target model that sees, given by hub id or folder; None for one of text alone.

    Raises:
        LoadError: The model sees, and its processor cannot be loaded.
    """
    raise NotImplementedError
