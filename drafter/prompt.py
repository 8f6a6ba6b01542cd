"""Prompts, and the keys by which texts are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
            `pixel_values`. Prompts with other inputs have nothing in common; see `of_images`.

    Raises:
        RequestError: A span is empty or outside of the prompt, or does not follow the one before.
    """

    ids: Sequence[int]
    spans: tuple[Span, ...] = ()
    inputs: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict, compare=False, repr=False)
    _follow: bool = field(default=False, init=False, compare=False, repr=False)  # inputs, from ids and digests

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if not end <= span.start < span.stop <= len(self.ids):
                raise RequestError(f"the span {span.start}:{span.stop} is empty, out of order or outside of the prompt")
            end = span.stop

    @classmethod
    def of_images(
        cls, ids: Sequence[int], spans: tuple[Span, ...], inputs: Mapping[str, npt.NDArray[np.generic]]
    ) -> Prompt:
        """Return a prompt whose inputs follow from ids and digests, as an `ImageProcessor` makes it.

        It has in common with others what their ids and digests have.
        """
        made = cls(ids, spans, inputs)
        object.__setattr__(made, "_follow", True)  # no argument: a copy with other inputs is a prompt of anybody's
        return made

    def salted(self, salt: str) -> str:
        """Return a salt for what is kept by ids and digests: with one of the inputs, where these do not follow."""
        return f"{salt}\0{self._inputs_digest}" if self.inputs and not self._follow else salt

    @cached_property
    def _inputs_digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for name, given in sorted(self.inputs.items()):
            values = np.ascontiguousarray(given)
            found.update(f"{name} {values.dtype.str} {values.shape} ".encode())
            found.update(values.data)
        return found.hexdigest()

    def key(self, salt: str, text: npt.NDArray[np.int64] | None = None) -> TextKey:
        """Return the key of the prompt, or of a text `[L]` that begins with it."""
        if text is None:
            text = np.array(self.ids, dtype=np.int64)
        salt = self.salted(salt)
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
