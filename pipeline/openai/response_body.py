"""How OpenAI's clients are told what was generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from drafter.requests import Generation, TokenLogprob
from pipeline.openai.request_body import ParsedRequest

TokenText = Callable[[int], str]
"""The text of a token by itself."""


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token inside a text, which may begin with a space; `\ufffd` stands for half a character."""
    # Tokenisers that put words together leave out the space before the first one, so the second one tells.
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    return twice[len(once) :]


def chat_response(
    request: ParsedRequest, generations: Sequence[Generation], name: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """The body that answers a request to `/v1/chat/completions`.

    Args:
        request: What was asked for; the answer names the same model.
        generations: One for each choice, in order.
        name: The answer's `id`.
        created: Seconds since 1970.
        token_text: Used where log-probabilities were asked for.
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
    """The body that answers a request to `/v1/completions`; see `chat_response`."""
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
    """Tokens that went in and came out.

    A prompt counts once, whatever its number of choices. Draft tokens are told as OpenAI tells those of a predicted
    output: accepted ones are part of the text, rejected ones were verified for nothing.

    Args:
        generations: `n` of each prompt, one prompt after the other.
        n: Choices of a prompt.
    """
    went_in = sum(generation.prompt_tokens for generation in generations[::n])
    came_out = sum(len(generation.token_ids) for generation in generations)
    accepted = sum(generation.counts.num_accepted_draft_tokens for generation in generations)
    drafted = sum(generation.counts.num_draft_tokens for generation in generations)
    return {
        "prompt_tokens": went_in,
        "completion_tokens": came_out,
        "total_tokens": went_in + came_out,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob] | None, token_text: TokenText) -> dict[str, Any] | None:
    """Log-probabilities as a chat's choice, or a chunk of one, has them."""
    if logprobs is None:
        return None

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        # A token of half a character has no text, and so no bytes that would be known.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    return {
        "content": [
            {**told(one.token_id, one.logprob), "top_logprobs": [told(*other) for other in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }  # fmt: skip


def completion_logprobs(
    logprobs: Sequence[TokenLogprob] | None, token_text: TokenText, offset: int = 0
) -> dict[str, Any] | None:
    """Log-probabilities as a text completion's choice, or a chunk of one that begins at `offset`, has them."""
    if logprobs is None:
        return None
    texts = [token_text(one.token_id) for one in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [{token_text(token): logprob for token, logprob in one.top} for one in logprobs],
        "text_offset": offsets,
    }
