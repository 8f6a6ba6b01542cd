"""Answers that must be a record, by OpenAI's own client and by vLLM's field."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError, LengthFinishReasonError, OpenAI
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from drafter import SamplingParams, SpeculativeLM
from drafter.acceptance import limits
from drafter.methods.grammar import grammars
from drafter.structured_outputs import StructuredOutputs
from drafter.text import chat
from pipeline.openai.requests import parse_chat
from pipeline.serving import replica
from pipeline.serving.handles import Call
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.guides import hold_new
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

HOW_MANY: list[Any] = [{"role": "user", "content": "how many apples"}]


class Fruit(BaseModel):
    """What can be said of a fruit."""

    kind: Literal["apple", "pear"]
    ripe: bool
    eaten_by: list[Literal["worm", "bird"]]


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["apple", "pear"]},
        "ripe": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "ripe", "tags"],
    "additionalProperties": False,
}


def by_schema(schema: Any = SCHEMA) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema, "strict": True}}


def client_of(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture
def client(local: str) -> OpenAI:
    return client_of(local)


SETTINGS: dict[str, Any] = {"model": NAME, "messages": HOW_MANY, "seed": 3, "max_tokens": 200}


def test_parse_gives_an_instance(client: OpenAI, local: str) -> None:
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        choice = parse(**SETTINGS, response_format=Fruit).choices[0]
        assert isinstance(choice.message.parsed, Fruit)
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "") == choice.message.parsed.model_dump()

    async def ask() -> Fruit | None:
        async with AsyncOpenAI(base_url=f"{local}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as other:
            answer = await other.chat.completions.parse(**SETTINGS, response_format=Fruit)
            return answer.choices[0].message.parsed

    assert asyncio.run(ask()) == choice.message.parsed


def test_a_stream_adds_up_to_the_answer(client: OpenAI) -> None:
    whole = client.chat.completions.parse(**SETTINGS, response_format=Fruit).choices[0].message
    with client.chat.completions.stream(**SETTINGS, response_format=Fruit) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(deltas) > 1
    assert "".join(deltas) == final.message.content == whole.content
    assert (final.message.parsed, final.finish_reason) == (whole.parsed, "stop")


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": SCHEMA},
        {"json_object": True},
        {"regex": "[a-c]{3,9}"},
        {"choice": ["apples", "pens and apples"]},
        {"grammar": 'start: "how" (" many")+'},
    ],
    ids=lambda wanted: str(*wanted),
)
def test_answers_are_those_of_plain_decoding(client: OpenAI, plain: SpeculativeLM, wanted: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "extra_body": {"structured_outputs": wanted}}
    settings = SamplingParams(max_new_tokens=40, structured_outputs=StructuredOutputs.of(wanted))
    expected = plain.generate(HOW_MANY, settings)[0]
    choice = client.chat.completions.create(model=NAME, messages=HOW_MANY, **asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    text = client.completions.create(model=NAME, prompt="how many apples", **asked).choices[0]
    assert text.text == plain.generate("how many apples", settings)[0].text
    if "json" in wanted:
        by_format = {**asked, "extra_body": {}, "response_format": by_schema()}
        assert client.chat.completions.create(model=NAME, messages=HOW_MANY, **by_format).choices[0] == choice


def test_several_records_with_log_probabilities(client: OpenAI) -> None:
    """The log-probabilities are the model's own, before the schema leaves tokens out."""
    asked: dict[str, Any] = {**SETTINGS, "response_format": by_schema(), "n": 3, "logprobs": True, "top_logprobs": 2}
    choices = client.chat.completions.create(**asked).choices
    assert len({choice.message.content for choice in choices}) > 1
    for choice in choices:
        assert list(json.loads(choice.message.content or "")) == SCHEMA["required"]
        assert choice.logprobs is not None
        told = choice.logprobs.content or []
        assert b"".join(bytes(one.bytes or []) for one in told).decode().startswith(choice.message.content or " ")
        assert min(one.logprob for one in told) < min(top.logprob for one in told for top in one.top_logprobs[:1])


def test_a_record_that_is_cut_short_says_so(client: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**SETTINGS | {"max_tokens": 4}, response_format=Fruit)


BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": by_schema({"type": "object", "properties": {"x": {"type": "number "}}})},
        "response_format",
        "",
    ),
    ({"response_format": by_schema({"unevaluatedProperties": False})}, "response_format", "unevaluatedProperties"),
    ({"response_format": by_schema({"type": "string", "pattern": "("})}, "response_format", ""),
    ({"extra_body": {"structured_outputs": {"regex": "a{1,"}}}, "structured_outputs", ""),
    ({"extra_body": {"structured_outputs": {"grammar": "start: other"}}}, "structured_outputs", "other"),
    ({"extra_body": {"guided_json": {}}}, "guided_json", "use 'structured_outputs'"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "param", "words"), BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_followed_is_a_mistake_of_that_field(
    client: OpenAI, asked: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        client.chat.completions.create(**SETTINGS, **asked, stream=stream)
    assert refusal.value.param == param
    assert words in refusal.value.message
    assert "\n" not in refusal.value.message


def test_an_answer_that_cannot_go_on_is_a_mistake_of_that_field(client: OpenAI) -> None:
    """The other settings leave no token that the schema allows."""
    with pytest.raises(BadRequestError, match="no token is left") as refusal:
        client.chat.completions.create(
            **SETTINGS, response_format=by_schema(), extra_body={"allowed_token_ids": [70, 71]}
        )
    assert refusal.value.param == "response_format"


def wide(place: int) -> dict[str, Any]:
    """A schema that is nobody else's, and much work."""
    names = {f"p{place}x{number}": {"type": "string", "pattern": "^([a-z]{1,40}-)*$"} for number in range(200)}
    return {"type": "object", "properties": names, "additionalProperties": False}


def streamed_text(client: OpenAI, question: str) -> str:
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0}
    chunks = client.chat.completions.create(**asked, max_tokens=150, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def ask(client: OpenAI, schema: Any) -> Choice:
    asked: Any = {**SETTINGS, "max_tokens": 12, "response_format": by_schema(schema)}
    choice: Choice = client.chat.completions.create(**asked).choices[0]
    return choice


def test_many_new_schemas_at_once_cost_a_neighbour_no_token(local: str, plain: SpeculativeLM) -> None:
    expected = plain.chat(["how many pens"], max_new_tokens=150)[0].text
    with ThreadPoolExecutor(21) as pool:
        neighbour = pool.submit(streamed_text, client_of(local), "how many pens")
        schemas: list[Any] = [wide(place) if place % 2 else {"not": {"x": place}} for place in range(20)]
        asked = [pool.submit(ask, client_of(local), schema) for schema in schemas]
        for place, one in enumerate(asked):
            if place % 2:
                assert (one.result().message.content or "").startswith("{")
            else:
                assert isinstance(one.exception(), BadRequestError)
        assert neighbour.result() == expected


def test_a_schema_that_takes_its_time_delays_nobody_else(plain: SpeculativeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = hold_new(plain.engine.guides, monkeypatch)
    slow = {**SCHEMA, "description": "Nobody has asked for this before."}
    with served({NAME: Answers(plain, "replica", seconds=PATIENCE)}) as address, ThreadPoolExecutor(1) as pool:
        client = client_of(address)
        waiting = pool.submit(ask, client, slow)
        assert begun.wait(PATIENCE)
        assert client.chat.completions.create(**SETTINGS).choices
        assert client.chat.completions.create(**SETTINGS, response_format={"type": "text"}).choices
        assert not waiting.done()
        may_go_on.set()
        assert (waiting.result().message.content or "").startswith('{"kind": "')
        begun.clear()
        assert ask(client, slow)  # it is known by now
        assert not begun.is_set()


def test_what_another_key_has_sent_saves_no_work(plain: SpeculativeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Counter[str]()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            work[name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    count(chat, "_render")
    count(grammars, "compiled")
    count(replica, "token_text")
    count(limits, "refuse_panics")  # around each bad word
    schema = {**SCHEMA, "description": "Nobody has asked for this before either."}
    given = {**SETTINGS, "messages": [*HOW_MANY, *HOW_MANY], "logprobs": True, "response_format": by_schema(schema)}
    call = Call(parse_chat({**given, "bad_words": ["x", "y z"]}), speculation=False)

    async def asked(answers: Answers, clients: str) -> list[tuple[str, Counter[str]]]:
        found = []
        for client in clients:
            work.clear()
            parts = [str(part) async for part in answers.answer(replace(call, client=client))]
            found.append((json.loads("".join(parts))["choices"][0]["message"]["content"], work.copy()))
        return found

    # What a template can do is found out once, by whoever comes first.
    _, first, again, other = asyncio.run(asked(Answers(plain, "replica", seconds=PATIENCE), "zaab"))
    assert first == other
    assert again[0] == first[0]
    assert set(first[1]) == {"_render", "compiled", "token_text", "refuse_panics"}
    assert again[1].total() < first[1].total()
    assert not {"compiled", "token_text", "refuse_panics"} & set(again[1])
