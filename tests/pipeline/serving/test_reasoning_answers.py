"""Answers of a model that reasons before: a record, a call or a text; whole, streamed, in Python and on a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from drafter import EngineConfig, SpeculativeLM
from drafter.edge.client import EdgeLM
from drafter.text.tokenizers import special_texts
from pipeline.serving.config import EdgeConfig
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.calling import with_tools
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
RECORD = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "stop": {"stop": ["a", "e"]},
    "record": {"response_format": RECORD},
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "record or call": {"tools": [TOOL], "response_format": RECORD},
}
HOW_MANY: list[Any] = [{"role": "user", "content": "how many apples"}]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def lm(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpeculativeLM]:
    folder = tmp_path_factory.mktemp("reasoning")
    with_tools(model, folder, tokens=True, reasons=True, special=request.param)
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=4)
    with SpeculativeLM.from_pretrained(folder, "ngram", config=config, brought=4) as lm:
        yield lm


@pytest.fixture(scope="module")
def address(lm: SpeculativeLM) -> Iterator[str]:
    edge = EdgeConfig(sessions=2, draft_tokens=4)
    with served({NAME: Answers(lm, "replica", PATIENCE, edge)}, edge=edge) as address:
        yield address


@pytest.mark.parametrize("kind", ASKED)
def test_reasoning_is_beside_the_answer_on_every_way(lm: SpeculativeLM, address: str, kind: str) -> None:
    end = lm.tokenizer.get_vocab()["</think>"]
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    asked = {"model": NAME, "messages": HOW_MANY, "seed": 3, "max_tokens": 60, **ASKED[kind], "n": 3}
    asked["extra_body"] = {"logit_bias": {str(end): 6}}
    seen = 0
    streams: list[dict[str, Any]] = [{"content": "", "reasoning_content": "", "arguments": ""} for _ in range(3)]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            for name in ("content", "reasoning_content"):
                streams[choice.index][name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                streams[choice.index]["arguments"] += call["function"]["arguments"]
    for choice, stream in zip(client.chat.completions.create(**asked).choices, streams, strict=True):
        message = choice.message.model_dump()
        calls = message["tool_calls"] or []
        assert stream == {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content") or "",
            "arguments": "".join(call["function"]["arguments"] for call in calls),
        }
        assert kind in ("text", "stop") or "think>" not in str(message)
        if choice.finish_reason == "length":
            continue
        seen += 1
        if kind == "stop":
            assert not set(message["content"]) & {"a", "e"}
        elif kind != "text":
            arguments = calls[0]["function"]["arguments"] if calls else message["content"]
            assert json.loads(arguments) in ({"n": 1}, {"n": 2})
            assert bool(calls) == (kind == "call") or kind == "record or call"
    assert seen or kind == "text"


def test_python_and_devices_read_it_in_the_same_way(lm: SpeculativeLM, address: str) -> None:
    end = lm.tokenizer.get_vocab()["</think>"]
    # A stop string is also found in the text of a special token, which no answer shows.
    unseen = {token: -100.0 for token, text in special_texts(lm.tokenizer).items() if "e" in text}
    found = set()
    for seed in range(3):
        settings: dict[str, Any] = {
            "max_new_tokens": 40,
            "temperature": 0.9,
            "seed": seed,
            "stop": ["e"],
            "logit_bias": unseen | {end: 5},
        }
        [answer] = lm.chat([HOW_MANY], **settings)
        [endless] = lm.chat([HOW_MANY], **settings | {"stop": ()})
        assert endless.token_ids[: len(answer.token_ids)] == answer.token_ids
        assert endless.text.partition("e")[0] == answer.text
        assert endless.reasoning_content == answer.reasoning_content
        stream = lm.stream(HOW_MANY, **settings)
        deltas = list(stream)
        assert "".join(one.text for one in deltas) == answer.text
        assert "".join(one.reasoning_content for one in deltas) == answer.reasoning_content
        other = EdgeLM(address, "none", tokenizer=lm.tokenizer).stream(HOW_MANY, **settings)
        parts = list(other)
        assert "".join(one.text for one in parts) == answer.text == other.result().text
        assert "".join(one.reasoning_content for one in parts) == answer.reasoning_content
        assert other.result().reasoning_content == answer.reasoning_content
        found.add(end in answer.token_ids)
    assert True in found
