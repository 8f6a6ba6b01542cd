"""The bodies of answers: what was generated, in OpenAI's schema."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from drafter.requests import Generation, TokenLogprob
from pipeline.openai.api_error import not_finite
from pipeline.openai.parsed_request import ParsedRequest

TokenText = Callable[[int], str]
"""Gives the text of a token by itself; bytes of half a character are surrogates, as Python's `surrogateescape` has
them."""
_HALVES = re.compile("[\udc80-\udcff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token for a byte in vocabularies of SentencePiece."""
_PRINTED_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED_BYTES} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED_BYTES)))
}
"""Bytes as vocabularies of byte-level BPE write them, since GPT-2."""
_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability of a token that is too unlikely for a number; JSON has no minus infinity."""


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token inside a text, which may begin with a space; see `TokenText`.

    Where the vocabulary does not say which bytes a token of half a character has, `\ufffd` stands for it.
    """
    # Tokenisers that put words together leave out the space before the first one, so the second one tells.
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    text = twice[len(once) :]
    if "\ufffd" not in text:
        return text
    known = _vocabulary_bytes(str(tokenizer.convert_ids_to_tokens(token)))
    return text if known is None else known.decode(errors="surrogateescape")


def _vocabulary_bytes(entry: str) -> bytes | None:
    """Return the bytes of an entry of a vocabulary; None where it is not written as bytes are."""
    if found := _BYTE_TOKEN.fullmatch(entry):
        return bytes([int(found[1], 16)])
    return bytes(_BYTES[character] for character in entry) if all(one in _BYTES for one in entry) else None


def _shown(text: str) -> str:
    """Return a token's text without the bytes of half characters, which no JSON has; it is as long."""
    return _HALVES.sub("\ufffd", text)


def chat_response(
    request: ParsedRequest, generations: Sequence[Generation], name: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """Return the body that answers a request to `/v1/chat/completions`.

    Args:
        request: What was asked for; the answer names the same model.
        generations: One for each choice, in order.
        name: The answer's `id`.
        created: Seconds since 1970.
        token_text: Used where log-probabilities were asked for.

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
    """Return the numbers of tokens that went in and came out.

    A prompt counts once, whatever its number of choices. Draft tokens stand where OpenAI has those of a predicted
    output: accepted ones are part of the text, rejected ones were verified for nothing.

    Args:
        generations: `n` of each prompt, one prompt after the other.
        n: Choices of a prompt.
    """
    prompt = sum(generation.prompt_tokens for generation in generations[::n])
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

    def described(token: int, logprob: float) -> dict[str, Any]:
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
    """Return log-probabilities as a choice of a text completion, or a chunk of one, has them.

    Args:
        logprobs: Of each token; None where they were not asked for.
        token_text: Gives their texts.
        offset: Where in the choice's text the chunk begins.

    Raises:
        OpenAIError: One is not a number.
    """
    if logprobs is None:
        return None
    texts = [_shown(token_text(one.token_id)) for one in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_number(one.logprob) for one in logprobs],
        "top_logprobs": [
            {_shown(token_text(token)): _number(logprob) for token, logprob in one.top} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _number(logprob: float) -> float:
    """Return a log-probability as JSON can have it.

    Raises:
        OpenAIError: It is not a number, because the base's forward has overflowed.
    """
    if logprob == -math.inf:
        return _IMPOSSIBLE
    if not math.isfinite(logprob):
        raise not_finite()
    return logprob
