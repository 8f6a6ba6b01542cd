"""Response bodies in OpenAI's schema, with an extension on draft statistics.

A body asks for it with `"speculation": true` (`extra_body` of OpenAI's Python client). The answer then has a field
`speculation`: in a chunk of a stream the statistics of its step; in the last chunk of a choice, and in each choice of
an answer that is not streamed, the statistics of the whole.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from drafter.requests import Generation, TokenDelta, TokenLogprob
from drafter.statistics import statistics_columns
from pipeline.openai.requests import ParsedRequest, bad_request, not_finite, to_json

FIELD = "speculation"


def wants_speculation(body: Any) -> bool:
    """Remove the extension from a body, and return whether it was asked for.

    Raises:
        OpenAIError: It is neither true nor false.
    """
    value = body.pop(FIELD, None) if isinstance(body, dict) else None
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"Invalid '{FIELD}': it must be true or false.", FIELD, "invalid_type")
    return bool(value)


def step_statistics(delta: TokenDelta) -> dict[str, Any]:
    """Return the number of new tokens of a decode step, and how many of them were drafted."""
    return {"tokens": len(delta.token_ids), "accepted": delta.accepted}


def generation_statistics(generation: Generation) -> dict[str, Any]:
    """Return the counts and ratios of the generation job's rows, and seconds since the request was submitted."""
    timing = generation.timing
    return {
        "num_output_tokens": len(generation.token_ids),
        **statistics_columns(generation.counts),
        "seconds_queued": timing.queued,
        "seconds_to_first_token": timing.first_token,
        "seconds": timing.total,
    }


def lossless_mark(*generations: Generation) -> dict[str, Any]:
    """Return the mark of every answer whose tokens may differ from plain decoding's; empty for others."""
    marked = [generation for generation in generations if not generation.lossless]
    if not marked:
        return {}
    lenient = sum(len(generation.lenient) for generation in marked)
    return {"lossless": False, "verifier": marked[0].verifier, "lenient_tokens": lenient}


# Bodies.

TokenText = Callable[[int], str]
"""Gives the text of a single token. Bytes of a partial character are surrogates, as in Python's `surrogateescape`."""
_HALVES = re.compile("[\udc80-\udcff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte token in vocabularies of SentencePiece."""
_PRINTED_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED_BYTES} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED_BYTES)))
}
"""Bytes as vocabularies of byte-level BPE write them, since GPT-2."""
_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability of a token that is too unlikely for a number; JSON has no minus infinity."""


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token inside a text, which may begin with a space; see `TokenText`.

    `\ufffd` stands for a partial character whose bytes the vocabulary does not tell.
    """
    # Some tokenisers leave out the space before the first word, so the second token tells.
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    text = twice[len(once) :]
    if "\ufffd" not in text:
        return text
    known = _vocabulary_bytes(str(tokenizer.convert_ids_to_tokens(token)))
    return text if known is None else known.decode(errors="surrogateescape")


def _vocabulary_bytes(entry: str) -> bytes | None:
    """Bytes of a vocabulary entry; None where it is not written in bytes."""
    if found := _BYTE_TOKEN.fullmatch(entry):
        return bytes([int(found[1], 16)])
    return bytes(_BYTES[character] for character in entry) if all(one in _BYTES for one in entry) else None


def _shown(text: str) -> str:
    """Replace the bytes of partial characters, which JSON cannot have. The length stays the same."""
    return _HALVES.sub("\ufffd", text)


def chat_response(
    request: ParsedRequest, generations: Sequence[Generation], name: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """Return the body that answers a request to `/v1/chat/completions`.

    Args:
        generations: One for each choice, in order.
        name: The answer's `id`.
        created: Seconds since 1970.

    Raises:
        OpenAIError: A log-probability is not a number.
    """
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": generation.text, "refusal": None},
            "logprobs": chat_logprobs(generation.logprobs, token_text),
            "finish_reason": generation.finish_reason,
        }
        for index, generation in enumerate(generations)
    ]
    return _response("chat.completion", request, choices, generations, name, created)


def completion_response(
    request: ParsedRequest, generations: Sequence[Generation], name: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """Return the body that answers a request to `/v1/completions`; see `chat_response`."""
    choices = [
        {
            "index": index,
            "text": generation.text,
            "logprobs": completion_logprobs(generation.logprobs, token_text),
            "finish_reason": generation.finish_reason,
        }
        for index, generation in enumerate(generations)
    ]
    return _response("text_completion", request, choices, generations, name, created)


def echoed(generation: Generation, prompt: str) -> Generation:
    """Return a generation whose text, and log-probabilities, begin with those of its prompt."""
    logprobs = generation.logprobs
    if generation.prompt_logprobs is not None:
        logprobs = [*generation.prompt_logprobs, *(logprobs or [])]
    return replace(generation, text=prompt + generation.text, logprobs=logprobs)


def _response(
    kind: str,
    request: ParsedRequest,
    choices: list[dict[str, Any]],
    generations: Sequence[Generation],
    name: str,
    created: int,
) -> dict[str, Any]:
    return {
        "id": name,
        "object": kind,
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": usage(generations, request.n),
        "system_fingerprint": None,
    }


def usage(generations: Sequence[Generation], n: int = 1) -> dict[str, Any]:
    """Return the token counts. A prompt counts once, whatever its number of choices.

    Draft tokens stand where OpenAI counts those of a predicted output: rejected ones were verified for nothing.
    `generations` has `n` of each prompt, one prompt after the other.
    """
    prompt = sum(generation.num_prompt_tokens for generation in generations[::n])
    output = sum(len(generation.token_ids) for generation in generations)
    accepted = sum(generation.counts.num_accepted_draft_tokens for generation in generations)
    drafted = sum(generation.counts.num_draft_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def chat_logprobs(
    logprobs: Sequence[TokenLogprob] | None, token_text: TokenText, _offset: int = 0
) -> dict[str, Any] | None:
    """Return log-probabilities as a choice of a chat, or a chunk of one, has them; see `completion_logprobs`.

    Raises:
        OpenAIError: One is not a number.
    """
    if logprobs is None:
        return None

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(token)
        known = None if "\ufffd" in text else list(text.encode(errors="surrogateescape"))
        return {"token": _shown(text), "logprob": _number(logprob), "bytes": known}

    return {
        "content": [
            {**described(one.token_id, one.logprob), "top_logprobs": [described(*other) for other in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob] | None, token_text: TokenText, offset: int = 0
) -> dict[str, Any] | None:
    """Return log-probabilities of a text completion's choice, or of a chunk that begins at `offset` in its text.

    Raises:
        OpenAIError: One is not a number.
    """
    if logprobs is None:
        return None

    def by_text(top: Sequence[tuple[int, float]]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for token, logprob in top:  # the most probable first: of tokens with one text it counts
            found.setdefault(_shown(token_text(token)), _number(logprob))
        return found

    texts = [_shown(token_text(one.token_id)) for one in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_number(one.logprob) for one in logprobs],
        "top_logprobs": [None if one.logprob is None else by_text(one.top) for one in logprobs],
        "text_offset": offsets,
    }


def _number(logprob: float | None) -> float | None:
    """Return a log-probability as JSON can have it; null for the first token of a prompt.

    Raises:
        OpenAIError: It is not a number, because the target model's forward has overflowed.
    """
    if logprob is None:
        return None
    if logprob == -math.inf:
        return _IMPOSSIBLE
    if not math.isfinite(logprob):
        raise not_finite()
    return logprob


# An answer with log-probabilities is written in pieces: it may be a hundred megabytes of JSON.

LogprobsOf = Callable[[Sequence[TokenLogprob], TokenText, int], dict[str, Any] | None]
"""Formats the log-probabilities of some tokens for a choice; the number is their offset in its text."""
_SLICE = 64
"""Tokens of a piece, which takes a few milliseconds at most."""


def long_answer(
    body: dict[str, Any], generations: Sequence[Generation], logprobs_of: LogprobsOf, token_text: TokenText
) -> Iterator[str]:
    """Yield the pieces of an answer's JSON text: of `body`, with the log-probabilities of each choice's generation.

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
    return to_json(value)[:-1] + ("," if value else "")
