"""Log-probabilities of a row's output, and of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.engine.handle import Handle
from drafter.parts.contract import NewTokens, Row, RowPart
from drafter.requests import Request, TokenLogprob


class LogprobPart(RowPart):
    """Collects what a request wants. A prompt with log-probabilities is read by itself, and all of it."""

    def __init__(self, request: Request) -> None:
        self._of_output = list[TokenLogprob]() if request.sampling.logprobs is not None else None
        self._of_prompt: list[TokenLogprob] | None = None
        self.apart = self.alone = request.prompt_logprobs is not None
        if self.alone:
            self._of_prompt = [TokenLogprob(token, None, ()) for token in request.prompt_ids]

    def after_reading(self, start: int, found: list[TokenLogprob]) -> None:
        for place, one in enumerate(found, start + 1):
            if self._of_prompt is not None and place < len(self._of_prompt):
                self._of_prompt[place] = one

    def after_step(self, row: Row, new: NewTokens) -> None:
        if self._of_output is not None and new.logprobs is not None:
            self._of_output += new.logprobs

    def result(self, row: Row) -> Mapping[str, Any]:
        return {"logprobs": self._of_output, "prompt_logprobs": self._of_prompt}


def logprob_room(handle: Handle) -> LogprobPart | None:
    """Return the part of a request that wants log-probabilities."""
    request = handle.request
    wanted = request.sampling.logprobs is not None or request.prompt_logprobs is not None
    return LogprobPart(request) if wanted else None
