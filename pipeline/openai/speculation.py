"""An extension of OpenAI's schema: what became of the draft. It is in answers only where it was asked for.

A body asks with `"speculation": true` (`extra_body` of OpenAI's Python client). The answer then has `speculation`
beside the fields of OpenAI's schema: in a chunk of a stream, what its step did; in the last chunk of a choice, and for
each choice of an answer that is not streamed, the statistics of the whole.
"""

from __future__ import annotations

from typing import Any

from drafter.requests import Generation, TokenDelta
from drafter.statistics import statistics_columns
from pipeline.openai.api_error import bad_request

FIELD = "speculation"


def wants_speculation(body: Any) -> bool:
    """Take the extension out of a body, and return whether it was asked for.

    Raises:
        OpenAIError: It is neither true nor false.
    """
    value = body.pop(FIELD, None) if isinstance(body, dict) else None
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"Invalid '{FIELD}': it must be true or false.", FIELD, "invalid_type")
    return bool(value)


def step_statistics(delta: TokenDelta) -> dict[str, Any]:
    """Return what one decode step did: its new tokens, and how many of them were drafted."""
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
    """Return the mark of an answer whose tokens may differ from plain decoding's; nothing for any other.

    It is in every such answer, asked for or not.
    """
    marked = [generation for generation in generations if not generation.lossless]
    if not marked:
        return {}
    lenient = sum(len(generation.lenient) for generation in marked)
    return {"lossless": False, "verifier": marked[0].verifier, "lenient_tokens": lenient}
