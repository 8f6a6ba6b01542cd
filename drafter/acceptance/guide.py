"""Interface of guides, which say what may follow a row's output: a grammar's state, for one.

A guide belongs to one sequence and follows its output, so that a preempted or re-read sequence loses nothing. Methods
add what makes guides (`Method.guides`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any

from torch import Tensor

from drafter.errors import RequestError
from drafter.plugins import resolved
from drafter.structured_outputs import StructuredOutputs


class PutOff:
    """Work on the masks of a step that is put off until all of it is known, and may then be done in parallel."""

    def __init__(self) -> None:
        self._together: dict[Callable[[list[Any]], None], list[Any]] = {}
        self._after: list[Callable[[], object]] = []

    def together(self, do: Callable[[list[Any]], None], piece: Any) -> None:
        """Put off a piece of what `do` does, which gets all of its pieces at once."""
        self._together.setdefault(do, []).append(piece)

    def after(self, work: Callable[[], object]) -> None:
        """Put off work that comes after all pieces, in the order in which it was put off."""
        self._after.append(work)

    def do(self) -> None:
        """Do it."""
        for do, pieces in self._together.items():
            do(pieces)
        for work in self._after:
            work()


class Guide(ABC):
    """A state after some tokens of one output."""

    @abstractmethod
    def consume(self, token: int) -> bool:
        """Go on by `token` if it may follow; otherwise change nothing and return False."""

    @abstractmethod
    def rewind(self, count: int) -> None:
        """Take back the last `count` consumed tokens."""

    @abstractmethod
    def forced(self) -> Sequence[int]:
        """Return the tokens that come next whatever the model says; empty where it has a choice.

        They are drafts like others: where a text has several tokenisations, the model may choose another one.
        """

    @abstractmethod
    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        """Set the bits of `mask` `[ceil(V / 32)]` int32, on the host: 1 for tokens that may follow, 0 for others.

        What takes time may be put off to `later`, if there is such a thing; the guide may have gone on by then.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True after an end-of-sequence token: the output is whole."""

    @property
    def valid(self) -> bool:
        """True if the output is whole, and what could not be seen before its end holds, too."""
        return self.ended

    @property
    def problem(self) -> str | None:
        """Why nothing may follow, if its work became too much for its limits."""
        return None


class Guides(ABC):
    """Makes the guides of an engine's requests. Safe from any thread."""

    @abstractmethod
    def guide(self, asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        """Return a guide for the output of a request; raise `RequestError` for what cannot be followed.

        What is worked out for one salt serves no other one; see `Request.salt`.
        """

    def ready(self, asked: StructuredOutputs, salt: str = "") -> bool:
        """Return whether `guide` takes no time, because it has been asked for the same."""
        return False

    def stop(self) -> None:  # noqa: B027 (there may be nothing to end)
        """End the work on what is being asked for, as far as possible: `guide` then raises `RequestError`."""

    def spent(self) -> float:
        """Return the seconds of processor time so far: of this thread, and of other processes for all guides."""
        return time.thread_time()


class FirstGuides(Guides):
    """What the first method that makes guides makes of a model's tokeniser, as soon as a request needs it."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._settings, self._made, self._lock = (tokenizer, vocabulary, eos), list[Guides](), Lock()

    def guide(self, asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        with self._lock:
            if not self._made:
                makers = list(resolved("guides").values())
                if not makers:
                    raise RequestError("structured_outputs cannot be met: no method that guides output is installed")
                self._made.append(makers[0](*self._settings))
        return self._made[0].guide(asked, prompt, salt)

    def ready(self, asked: StructuredOutputs, salt: str = "") -> bool:
        return bool(self._made) and self._made[0].ready(asked, salt)

    def stop(self) -> None:
        for made in self._made:
            made.stop()

    def spent(self) -> float:
        return self._made[0].spent() if self._made else super().spent()
