"""Prompts, and the keys by which texts are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drafter.errors import RequestError


@dataclass(frozen=True)
class Span:
    """Tokens `start … stop − 1` of a prompt that stand for something else, such as an image with this `digest`."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True)
class Prompt:
    """Token ids, at least one, and the spans that are not what their ids say.

    Args:
        spans: One for each image, from its first placeholder to its last; their digests are the images'.
        inputs: What the target model's own forward takes beside the ids, by the names of its processor, such as
            `pixel_values`. They follow from ids and digests, and so are not compared.

    Raises:
        RequestError: A span is empty or outside of the prompt, or does not follow the one before.
    """

    ids: Sequence[int]
    spans: tuple[Span, ...] = ()
    inputs: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if not end <= span.start < span.stop <= len(self.ids):
                raise RequestError(f"the span {span.start}:{span.stop} is empty, out of order or outside of the prompt")
            end = span.stop

    def key(self, salt: str, text: npt.NDArray[np.int64] | None = None) -> TextKey:
        """Return the key of the prompt, or of a text `[L]` that begins with it."""
        if text is None:
            text = np.array(self.ids, dtype=np.int64)
        if not self.spans:
            return TextKey(salt, text)
        ids = text.copy()
        for span in self.spans:
            size = span.stop - span.start
            # Numbers of its own for each place: the end of one span is not the beginning of the next. Negative ones:
            # no token has them.
            digits = hashlib.shake_128(b"%d:%b" % (size, span.digest)).digest(8 * size)
            ids[span.start : span.stop] = np.frombuffer(digits, np.int64) | np.iinfo(np.int64).min
        return TextKey(salt, ids)


@dataclass(frozen=True)
class TextKey:
    """What is compared of a text, in place of its tokens.

    `ids` `[L]` are these, where a span's follow from its digest. `salt` says whose the text is.
    """

    salt: str
    ids: npt.NDArray[np.int64]

    def beginning(self, size: int) -> tuple[str, bytes]:
        """Return what equal keys of the first `size` tokens have in common."""
        return self.salt, self.ids[:size].tobytes()

    def shared(self, other: TextKey) -> int:
        """Return the number of tokens with which both texts begin; 0 for different salts."""
        if self.salt != other.salt:
            return 0
        size = min(len(self.ids), len(other.ids))
        differs = self.ids[:size] != other.ids[:size]
        return int(differs.argmax()) if differs.any() else size
