"""The column of log-probabilities: for each generated token, its own and those of the most probable tokens."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from drafter.requests import TokenLogprob

_TOKEN = [("token_id", pa.int64()), ("logprob", pa.float64())]
LOGPROBS_TYPE = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))
"""Arrow type of the column."""


def logprobs_value(logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    """Return the column's value for a row with these log-probabilities."""
    if logprobs is None:
        return None
    return [
        {
            "token_id": one.token_id,
            "logprob": one.logprob,
            "top": [{"token_id": token, "logprob": logprob} for token, logprob in one.top],
        }
        for one in logprobs
    ]


def logprobs_of(value: list[dict[str, Any]] | None) -> list[TokenLogprob] | None:
    """Return the log-probabilities that a value of the column stands for."""
    if value is None:
        return None
    return [
        TokenLogprob(
            one["token_id"], one["logprob"], tuple((other["token_id"], other["logprob"]) for other in one["top"])
        )
        for one in value
    ]
