"""Reasoning before a record: a grammar begins after the token that ends it, also where that lies inside a draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafter.acceptance.guide import Guide
from drafter.methods.grammar.bits import allow, allow_all_but

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"))
"""Tokens around reasoning: of Qwen 3, DeepSeek R1 and most others; of Magistral; of Seed-OSS; of Kimi."""


@dataclass(frozen=True)
class Markers:
    """The tokens that begin and end a model's reasoning."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Markers | None:
        """Return those of a tokeniser that has them as single tokens; None for a model that does not reason so."""
        vocabulary = tokenizer.get_vocab()
        return next((cls(vocabulary[b], vocabulary[e]) for b, e in _PAIRS if b in vocabulary and e in vocabulary), None)

    def guide(self, inner: Guide, prompt: Sequence[int], tokenizer: Any, eos: Collection[int]) -> Guide:
        """Return a guide that begins after the reasoning, by what the prompt says of it.

        Templates begin it for models that always reason, and end with an empty one where it is switched off. Otherwise
        the model may begin with it or with the record.
        """
        last = {token: place for place, token in enumerate(prompt) if token in (self.begin, self.end)}
        begun, ended = last.get(self.begin, -1), last.get(self.end, -1)
        if begun > ended:
            return AfterReasoning(inner, self, eos, inside=True)
        if ended >= 0 and not tokenizer.decode(list(prompt[ended + 1 :])).strip():
            return inner
        return AfterReasoning(inner, self, eos, inside=False)


class AfterReasoning(Guide):
    """Lets all but the end of the output follow until reasoning has ended, and then what `inner` allows.

    Args:
        inside: Reasoning has begun; otherwise the first token decides whether it does.
    """

    def __init__(self, inner: Guide, markers: Markers, eos: Collection[int], *, inside: bool) -> None:
        self._inner, self._markers, self._eos, self._begins_inside = inner, markers, frozenset(eos), inside
        self._free = 0  # tokens of reasoning, with both markers
        self._guided = 0  # tokens that `inner` has consumed
        self._over = False  # the last free token has ended it

    @property
    def _inside(self) -> bool:
        return not self._over and (self._begins_inside or self._free > 0)

    def consume(self, token: int) -> bool:
        begins = token == self._markers.begin and not (self._over or self._guided)
        if self._inside or begins:
            if token in self._eos:
                return False
            self._free += 1
            self._over = token == self._markers.end
            return True
        if not self._inner.consume(token):
            return False
        self._guided += 1
        return True

    def rewind(self, count: int) -> None:
        of_record = min(count, self._guided)
        self._inner.rewind(of_record)
        self._guided -= of_record
        if count > of_record:
            self._free -= count - of_record
            self._over = False

    def forced(self) -> Sequence[int]:
        return self._inner.forced() if self._over or self._guided else ()

    def fill(self, mask: Tensor) -> None:
        if self._inside:
            allow_all_but(mask, self._eos)
            return
        self._inner.fill(mask)
        if not (self._over or self._guided):
            allow(mask, [self._markers.begin])

    @property
    def problem(self) -> str | None:
        return self._inner.problem
