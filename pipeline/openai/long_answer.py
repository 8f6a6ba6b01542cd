"""An answer with log-probabilities, written piece by piece: as a whole it may be a hundred megabytes of JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drafter.requests import Generation, TokenLogprob
from pipeline.openai.response_body import TokenText
from pipeline.openai.strict_json import to_json

LogprobsOf = Callable[[Sequence[TokenLogprob], TokenText, int], dict[str, Any] | None]
"""Gives the log-probabilities of some tokens as a choice has them; the number says where in its text they begin."""
_SLICE = 64
"""Tokens of a piece, which takes a few milliseconds at most."""


def long_answer(
    body: dict[str, Any], generations: Sequence[Generation], logprobs_of: LogprobsOf, token_text: TokenText
) -> Iterator[str]:
    """Yield the pieces of an answer's JSON text.

    Args:
        body: The answer, without log-probabilities.
        generations: One for each of its choices, with log-probabilities.
        logprobs_of: Puts them in the answer's schema.
        token_text: Gives the texts of tokens.

    Raises:
        OpenAIError: A log-probability is not a number.
    """
    head = _open({name: value for name, value in body.items() if name != "choices"}) + '"choices":['
    for choice, generation in zip(body["choices"], generations, strict=True):
        head += _open({name: value for name, value in choice.items() if name != "logprobs"}) + '"logprobs":'
        lists: dict[str, list[str]] = defaultdict(list)
        others: dict[str, Any] = {}
        offset = 0
        tokens = generation.logprobs or []
        for start in range(0, max(len(tokens), 1), _SLICE):
            some = tokens[start : start + _SLICE]
            for name, value in (logprobs_of(some, token_text, offset) or {}).items():
                if isinstance(value, list):
                    lists[name].append(to_json(value)[1:-1])
                else:
                    others[name] = value
            offset += sum(len(token_text(one.token_id)) for one in some)
            yield head
            head = ""
        joined = (f"{to_json(name)}:[{','.join(parts)}]" for name, parts in lists.items())
        head += _open(others) + ",".join(joined) + "}},"
    yield head.removesuffix(",") + "]}"


def _open(value: dict[str, Any]) -> str:
    """Return the JSON text of an object that goes on."""
    return to_json(value)[:-1] + ("," if value else "")
