"""Names that users bring along: ours are real, and each message is one line that says what to write."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, cast

import pytest

from drafter import RequestError, SamplingParams, SpeculativeLM
from drafter.engine.config import EngineConfig
from drafter.other_names import ELSEWHERE, NOT_SUPPORTED, OURS
from drafter.requests import Request
from pipeline.dataset.processor import ProcessorConfig

HERE = {field.name for kind in (SamplingParams, EngineConfig, ProcessorConfig, Request) for field in fields(kind)}
HERE |= {
    name
    for method in ("from_pretrained", "generate", "chat")
    for name in inspect.signature(getattr(SpeculativeLM, method)).parameters
}


def test_our_names_exist_and_theirs_do_not() -> None:
    assert set(OURS.values()) - {"SpeculativeLM.stream"} <= HERE
    assert set(ELSEWHERE) <= HERE
    settings = {field.name for kind in (SamplingParams, EngineConfig) for field in fields(kind)}
    assert not settings & (OURS.keys() | ELSEWHERE.keys() | NOT_SUPPORTED.keys())
    assert not OURS.keys() & NOT_SUPPORTED.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n", "unknown setting n: it is an argument of generate and chat"),
        ("prompt_logprobs", "unknown setting prompt_logprobs: it is an argument of generate"),
        ("guided_json", "unknown setting guided_json: use structured_outputs"),
        ("response_format", "unknown setting response_format: use structured_outputs"),
        ("tool_choice", "unknown setting tool_choice: not supported: an endpoint's chats have tools and tool_choice"),
        ("max_tokens", "unknown setting max_tokens: use max_new_tokens"),
        ("temprature", "unknown setting temprature: use temperature"),
        ("colour", "unknown setting colour; there are max_new_tokens, temperature"),
    ],
)
def test_each_says_what_to_write(name: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**cast(Any, {name: 5}))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
