"""The text of an output as its tokens come: reasoning apart from the answer, which ends before a stop string.

Engines, devices and results that are written later all read tokens here. Marks are looked for in tokens where they are
tokens, since the text has lost them or may say them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.requests import SamplingParams
from drafter.structured_outputs import CallOutputs
from drafter.text.call_marks import CallMarks
from drafter.text.detokenizer import Detokenizer, StopSearch
from drafter.text.reasoning import Reasoning, ReasoningMarks, ReasoningReader
from drafter.text.tokenizers import special_texts

_BEGIN, _END = "\udbfd", "\udbfe"
"""Stand for the tokens around the reasoning until these are found; no tokeniser's text has them."""
_NO_MARKS: Mapping[int, str] = {}


@dataclass(frozen=True)
class OutputText:
    """What an output says, or a part of it.

    Args:
        reasoning: Text before the answer; None where the model does not reason.
        text: The answer.
        marked: The answer with the marks of calls, where these may be asked for; see `CallMarks`.
    """

    reasoning: str | None
    text: str
    marked: str


class TextStream:
    """Reads the tokens of one output.

    - Reasoning is what comes before its end, if the prompt has begun it or the output begins with its mark. Marks are
      in neither part.
    - The answer is what comes after, without white space at its beginning. What a grammar has accepted is the answer
      to the character.
    - Stop strings are looked for in the answer, and end it.

    Args:
        prompt: The prompt's tokens.

    Attributes:
        searches: There are stop strings, so that each token must come before the next one is chosen.
        length: Characters of the answer that are sure.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], sampling: SamplingParams) -> None:
        asked, self._tokenizer = sampling.structured_outputs, tokenizer
        self._guided, exact = asked is not None, asked is not None and asked.kind != "calls"
        self._calls: CallMarks | None = None
        if isinstance(asked, CallOutputs) and asked.calls is not None:
            self._calls = CallMarks.of(tokenizer, asked.calls.form)
        self._reasoning = Reasoning.of(tokenizer)
        self._reader = _reader(self._reasoning, prompt, tokenizer, guided=self._guided, exact=exact)
        self._detokenizer = Detokenizer(tokenizer, goes_on=exact, exact=self._guided)
        self._stops, self._min_tokens = StopSearch(sampling.stop), sampling.min_tokens
        self._special = special_texts(tokenizer) if sampling.stop else {}
        self.searches = bool(sampling.stop)
        self._count = 0  # tokens
        self._said: tuple[list[str], list[str]] = [], []  # what is sure of the reasoning, and of the marked answer
        self._given = [0, 0]  # characters of these that `new` has returned
        self._unseen: tuple[list[str], list[str]] = [], []  # what comes after them
        self.length = 0
        self._whole: OutputText | None = None

    @property
    def found(self) -> bool:
        """True if a stop string has been found, which ends the output."""
        return self._stops.found

    def push(self, *tokens: int) -> None:
        start = 0
        while start < len(tokens) and not self.found:
            marks = self._token_marks()
            stop = start
            while stop < len(tokens) and tokens[stop] not in marks and not (self.searches and stop > start):
                stop += 1
            mark = marks[tokens[start]] if stop == start else None
            stop += mark is not None
            self._count += stop - start
            if mark is None:
                self._say(self._detokenizer.push(*tokens[start:stop]), self._detokenizer.tail)
            else:
                settled = self._detokenizer.tail
                self._detokenizer = Detokenizer(self._tokenizer, goes_on=True, exact=self._guided)
                self._say(settled + mark)
            if mark != _END and (special := self._special.get(tokens[stop - 1])):
                self._search(special, hidden=True)
            start = stop

    def new(self) -> OutputText:
        """Return what is sure and has not been returned yet. What may begin a stop string is held back."""
        reasoning, answer = map("".join, self._unseen)
        safe = max(len(self._plain(answer)) - self._stops.held_back, 0)
        given = answer[:safe] if self._calls is None else self._calls.beginning(answer, safe)
        self._unseen = [], [answer[len(given) :]]
        return self._give(reasoning, given)

    def rest(self) -> OutputText:
        """Return what `new` has not returned, at the end of the output."""
        whole = self.whole()
        return self._give((whole.reasoning or "")[self._given[0] :], whole.marked[self._given[1] :])

    def whole(self) -> OutputText:
        if self._whole is None:
            self._say(self._detokenizer.tail, last=True)
            reasoning, marked = map("".join, self._said)
            if (cut := self._stops.cut) is not None:
                marked = marked[:cut] if self._calls is None else self._calls.beginning(marked, cut, whole=False)
            self._whole = OutputText(None if self._reasoning is None else reasoning, self._plain(marked), marked)
        return self._whole

    def _token_marks(self) -> Mapping[int, str]:
        """Return what stands for tokens that are marks where the output is now."""
        reader, reasoning = self._reader, self._reasoning
        calls = _NO_MARKS if self._calls is None else self._calls.tokens
        if reader is None or reader.answers or reasoning is None or reasoning.begin is None or reasoning.end is None:
            return calls if reader is None or not reader.reasons else _NO_MARKS
        if reader.reasons:
            return {reasoning.begin: "", reasoning.end: _END}
        return {**calls, reasoning.begin: _BEGIN}

    def _say(self, text: str, tail: str = "", *, last: bool = False) -> None:
        """Add text, behind which there is a `tail` that may still change."""
        reader = self._reader
        reasoning, answer = ("", text) if reader is None else reader.push(text, last=last)
        if reader is not None and reader.waits:
            tail = tail.lstrip() if reader.answers else ""
        for place, more in enumerate((reasoning, answer)):
            if more:
                self._said[place].append(more)
                self._unseen[place].append(more)
        seen = self._plain(answer)
        self.length += len(seen)
        self._search(seen, tail)

    def _search(self, text: str, tail: str = "", *, hidden: bool = False) -> None:
        if self.searches and not self.found and not (self._reader is not None and self._reader.reasons):
            self._stops.push(text, tail, hidden=hidden, counts=self._count > self._min_tokens)

    def _plain(self, marked: str) -> str:
        return marked if self._calls is None else self._calls.plain(marked)

    def _give(self, reasoning: str, marked: str) -> OutputText:
        for place, given in enumerate((reasoning, marked)):
            self._given[place] += len(given)
        return OutputText(None if self._reasoning is None else reasoning, self._plain(marked), marked)


def _reader(
    reasoning: Reasoning | None, prompt: Sequence[int], tokenizer: Any, *, guided: bool, exact: bool
) -> ReasoningReader | None:
    """Return what parts an output; None if all of it is the answer."""
    if reasoning is None or (guided and reasoning.begin is None):  # a guide looks for tokens
        return None
    inside = reasoning.begun(prompt, tokenizer)
    if inside is False:
        return None
    marks = (reasoning.begin_text, reasoning.end_text) if reasoning.begin is None else (_BEGIN, _END)
    return ReasoningReader(ReasoningMarks(*marks, inside is True, guided, exact))


def read_output(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> OutputText:
    """Return what a whole output says; see `TextStream`."""
    stream = TextStream(tokenizer, prompt, sampling)
    stream.push(*output)
    return stream.whole()
