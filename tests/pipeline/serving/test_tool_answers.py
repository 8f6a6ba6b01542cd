"""Calls of tools in answers, whole and streamed, by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from drafter import EngineConfig, SpeculativeLM
from drafter.embedded import EMBEDDED_BASE
from drafter.text.tokenizers import load_tokenizer
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.calling import with_tools
from tests.support.local_endpoint import served
from tests.support.marks import slow_but
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module", params=slow_but(["special"], ["text", "special"]))
def calling(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that calls tools, whose marks are text, or special tokens."""
    return with_tools(
        model, tmp_path_factory.mktemp("calling"), tokens=request.param != "text", special=request.param == "special"
    )


@pytest.fixture(scope="module")
def address(calling: Path) -> Iterator[str]:
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=8)
    with (
        SpeculativeLM.from_pretrained(calling, "ngram", config=config) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        yield address


def client_of(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture
def client(address: str) -> OpenAI:
    return client_of(address)


class Buy(BaseModel):
    """Buy fruit."""

    fruit: Literal["apple", "pear"]
    ripe: bool


class Look(BaseModel):
    """Look at something."""

    at: Literal["tree", "sky"]


TOOLS: list[Any] = [openai.pydantic_function_tool(Buy), openai.pydantic_function_tool(Look)]
KINDS: dict[str, type[BaseModel]] = {"Buy": Buy, "Look": Look}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "Look"}}
HOW_MANY: list[Any] = [{"role": "user", "content": "how many apples"}]
ASKED: dict[str, Any] = {"model": NAME, "messages": HOW_MANY, "tools": TOOLS, "seed": 5, "max_tokens": 300}


def check_calls(choice: Choice) -> list[str]:
    """Check that all calls are of functions there are, with arguments that fit; return their names."""
    calls = choice.message.tool_calls or []
    assert calls
    assert choice.finish_reason in ("tool_calls", "length")
    names = []
    for call in calls[:-1] if choice.finish_reason == "length" else calls:
        assert call.type == "function"
        KINDS[call.function.name].model_validate_json(call.function.arguments, strict=True)
        names.append(call.function.name)
    assert len({call.id for call in calls}) == len(calls)
    return names


def test_a_call_that_is_required(client: OpenAI) -> None:
    several = set()
    for seed in range(4):
        asked: dict[str, Any] = {**ASKED, "seed": seed, "tool_choice": "required"}
        choice = client.chat.completions.create(**asked | {"parallel_tool_calls": False}).choices[0]
        assert len(check_calls(choice)) == 1
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        several.add(len(check_calls(client.chat.completions.create(**asked).choices[0])) > 1)
    assert True in several


def test_a_call_of_a_named_function(client: OpenAI) -> None:
    asked: Any = {**ASKED, "tool_choice": NAMED}
    choice = client.chat.completions.create(**asked).choices[0]
    assert check_calls(choice) == ["Look"]


def test_parse_gives_instances(client: OpenAI, address: str) -> None:
    asked: dict[str, Any] = {**ASKED, "tool_choice": "required"}
    message = client.chat.completions.parse(**asked).choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        assert isinstance(call.function.parsed_arguments, KINDS[call.function.name])

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as other:
            return (await other.chat.completions.parse(**asked)).choices[0].message

    again = asyncio.run(ask())
    assert [call.function for call in again.tool_calls] == [call.function for call in message.tool_calls]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_openais_stream_adds_up_to_the_answer(client: OpenAI, choice: Any) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content is other.message.content is None
        [call], [same] = one.message.tool_calls or [], other.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == (same.function.name, same.function.arguments)
        assert same.function.parsed_arguments == KINDS[same.function.name].model_validate_json(same.function.arguments)
        assert one.logprobs == other.logprobs
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events


@pytest.mark.parametrize("several", [None, False])
def test_any_stream_adds_up_to_the_answer(client: OpenAI, several: bool | None) -> None:
    for choice in ("auto", "required"):
        asked: dict[str, Any] = {**ASKED, "tool_choice": choice, "parallel_tool_calls": several, "max_tokens": 90}
        [whole] = client.chat.completions.create(**asked).choices
        content, calls, reason = "", list[list[str]](), None
        for chunk in client.chat.completions.create(**asked, stream=True):
            content += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
            for call in chunk.choices[0].delta.tool_calls or []:
                calls += [["", ""]] * (call.index == len(calls))
                name, arguments = calls[-1]
                calls[-1] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
        told = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []]
        assert (content, calls, reason) == (whole.message.content or "", told, whole.finish_reason)


def test_chunks_of_a_call_are_openais(client: OpenAI) -> None:
    """First its index, id and name; then its arguments piece by piece."""
    asked: Any = {**ASKED, "tool_choice": NAMED}
    chunks = client.chat.completions.create(**asked, stream=True)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    assert not any(delta.content for delta in deltas)
    begun, *rest = [call for delta in deltas for call in delta.tool_calls or []]
    assert (begun.index, begun.type, len(begun.id or "")) == (0, "function", 9)
    assert begun.function is not None
    assert (begun.function.name, begun.function.arguments) == ("Look", "")
    assert all((call.index, call.id, call.type) == (0, None, None) for call in rest)
    assert len(rest) > 1
    Look.model_validate_json("".join((call.function and call.function.arguments) or "" for call in rest))


def test_without_a_call_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    """Of a model that writes words."""
    folder = with_tools(EMBEDDED_BASE, tmp_path, tokens=True)
    asked: dict[str, Any] = {"model": NAME, "messages": HOW_MANY, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=4)
    with SpeculativeLM.from_pretrained(folder, "ngram", config=config) as lm:
        wanted = {
            "auto": lm.chat([HOW_MANY], tools=TOOLS, max_new_tokens=60)[0],
            "none": lm.chat([HOW_MANY], max_new_tokens=60)[0],
        }
        with served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address:
            for choice, plain in wanted.items():
                found = client_of(address).chat.completions.create(**asked | {"tool_choice": choice}).choices[0]
                assert (found.message.content, found.finish_reason) == (plain.text, plain.finish_reason)
                assert found.message.tool_calls is None


def test_a_call_after_a_text(client: OpenAI, calling: Path) -> None:
    """Random models do not call by themselves: the mark is asked for by bias, where it is a token."""
    mark = load_tokenizer(calling).get_vocab().get("<tool_call>")
    if mark is None:
        pytest.skip("the mark is no token")
    found = []
    for seed in range(12):
        asked: dict[str, Any] = {**ASKED, "seed": seed, "parallel_tool_calls": False, "logit_bias": {str(mark): 5}}
        choice = client.chat.completions.create(**asked).choices[0]
        if choice.message.tool_calls:
            found.append(choice.message.content)
            check_calls(choice)
    assert any(found)


def test_a_call_that_is_cut_short_has_the_arguments_until_there(client: OpenAI) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert whole
    lengths = set()
    for tokens in range(1, 60, 3):
        choice = client.chat.completions.create(**asked | {"max_tokens": tokens}).choices[0]
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
        for call, other in zip(choice.message.tool_calls or [], whole, strict=False):
            assert call.type == other.type == "function"
            assert other.function.arguments.startswith(call.function.arguments)
            lengths.add(len(call.function.arguments))
    assert len(lengths) > 2


def test_a_conversation_goes_on_with_what_the_tool_said(client: OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert first.message.tool_calls
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "7"}
    messages = [*HOW_MANY, first.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**ASKED | {"messages": messages}, tool_choice="none")
    assert answer.choices[0].message.content


def test_an_answer_without_a_call_may_have_to_be_a_record(client: OpenAI) -> None:
    seen = set()
    for seed in range(8):
        answer = client.chat.completions.parse(
            **ASKED | {"seed": seed, "parallel_tool_calls": False}, response_format=Look
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Look) != bool(message.tool_calls)
        seen.add(bool(message.tool_calls))
    assert seen


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", **parameters}}}


def test_the_schema_of_a_function_that_cannot_be_followed_is_named(client: OpenAI) -> None:
    odd = tool(properties={"x": {"unevaluatedProperties": False}})
    with pytest.raises(BadRequestError, match=r"'odd'.*unevaluatedProperties") as refusal:
        client.chat.completions.create(**ASKED | {"tools": [*TOOLS, odd]}, tool_choice="required")
    assert refusal.value.param == "tools"
    # Its arguments are only told to the model where it need not be called, and it is not strict.
    assert client.chat.completions.create(**ASKED | {"tools": [odd], "max_tokens": 3}).choices


def test_tools_that_the_template_does_not_show_are_told_in_a_message(model: Path, tmp_path: Path) -> None:
    folder = with_tools(model, tmp_path, tokens=False, shown=False)
    asked: dict[str, Any] = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    config = EngineConfig(max_num_seqs=2, num_draft_tokens=8)
    with (
        SpeculativeLM.from_pretrained(folder, "ngram", config=config) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        client = client_of(address)
        choice = client.chat.completions.create(**asked).choices[0]
        assert check_calls(choice) == ["Look"]
        result = {"role": "tool", "tool_call_id": "1", "content": "7"}
        asked["messages"] = [*HOW_MANY, choice.message.model_dump(exclude_none=True), result]
        assert check_calls(client.chat.completions.create(**asked).choices[0]) == ["Look"]
        none = client.chat.completions.create(**asked | {"tool_choice": "none", "max_tokens": 4})
        assert none.choices[0].message.tool_calls is None
