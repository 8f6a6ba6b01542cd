"""Bodies as OpenAI's clients write them, and those that cannot be honoured."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import SamplingParams
from drafter.text.conversation import Conversation
from pipeline.openai.errors import OpenAIError
from pipeline.openai.requests import parse_chat, parse_completion

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "messages": HELLO, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "davinci", "prompt": "Once", **more}


def test_a_chat_with_every_parameter() -> None:
    parsed = parse_chat(
        chat(
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            n=3,
            seed=-1,
            stop="\n",
            presence_penalty=0.5,
            frequency_penalty=-2,
            logit_bias={"5": -100, "7": 1.5},
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            user="u",
            metadata={"a": "b"},
            response_format={"type": "text"},
            tools=[],
            store=False,
        )
    )
    assert parsed.model == "gpt-4o-mini"
    assert parsed.prompts == (Conversation(HELLO),)
    assert parsed.settings == {
        "max_new_tokens": 7,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 2**63 - 1,
        "stop": ("\n",),
        "presence_penalty": 0.5,
        "frequency_penalty": -2.0,
        "logit_bias": {5: -100.0, 7: 1.5},
        "logprobs": 2,
    }
    assert (parsed.n, parsed.choices, parsed.stream, parsed.include_usage) == (3, 3, True, True)


def test_what_a_body_leaves_open() -> None:
    parsed = parse_chat(chat())
    assert parsed.settings == {}
    assert parsed.sampling(SamplingParams(9, temperature=1.0, seed=4)) == SamplingParams(9, temperature=1.0, seed=4)
    assert parse_completion(completion()).settings == {"max_new_tokens": 16}
    assert (parsed.n, parsed.stream, parsed.include_usage) == (1, False, False)


def test_null_is_not_set() -> None:
    names = [
        "temperature",
        "n",
        "stop",
        "tools",
        "logit_bias",
        "seed",
        "max_tokens",
        "stream_options",
        "response_format",
    ]
    assert parse_chat(chat(**dict.fromkeys(names))) == parse_chat(chat())
    copied: dict[str, Any] = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    (asked,) = parse_chat(chat(messages=[*HELLO, copied])).prompts
    assert asked == Conversation([*HELLO, {"role": "assistant", "content": "Hi"}])


def test_messages_of_every_kind() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    wanted: list[Any] = [{"role": "system", "content": "Be brief."}, messages[1]]
    assert parse_chat(chat(messages=messages)).prompts == (Conversation(wanted),)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_a_history_with_calls_of_tools() -> None:
    """Templates read arguments as objects, as vLLM gives them."""
    result = {"role": "tool", "tool_call_id": "a1", "content": "3"}
    (asked,) = parse_chat(chat(messages=[*HELLO, called('{"x": 1, "y": [2]}'), result], tools=TOOLS)).prompts
    call = called({"x": 1, "y": [2]})
    del call["content"]
    assert asked == Conversation([*HELLO, call, result], tools=TOOLS)
    (asked,) = parse_chat(chat(messages=[called(""), result])).prompts
    assert asked == Conversation([{**call, "tool_calls": called({})["tool_calls"]}, result])
    assert parse_chat(chat(tools=TOOLS, tool_choice="none")).prompts == (Conversation(HELLO),)


def test_an_answers_reasoning_comes_back() -> None:
    said = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    assert parse_chat(chat(messages=[*HELLO, said, *HELLO])).prompts == (Conversation([*HELLO, said, *HELLO]),)
    for value in (None, ""):
        (asked,) = parse_chat(chat(messages=[*HELLO, {**said, "reasoning_content": value}])).prompts
        assert asked == Conversation([*HELLO, {"role": "assistant", "content": "5"}])
    cut = {"role": "assistant", "content": None, "reasoning_content": "2 and"}
    (asked,) = parse_chat(chat(messages=[*HELLO, cut, *HELLO])).prompts
    assert asked == Conversation([*HELLO, {**cut, "content": ""}, *HELLO])
    for wrong in ({**said, "reasoning_content": 1}, {**said, "role": "user"}):
        with pytest.raises(OpenAIError) as caught:
            parse_chat(chat(messages=[wrong]))
        assert caught.value.param == "messages[0].reasoning_content"


def test_what_goes_to_the_chat_template() -> None:
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert parse_chat(chat(**asked)).prompts == (Conversation(HELLO, **asked),)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ("Once",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_prompts_of_every_kind(prompt: Any, prompts: Any) -> None:
    parsed = parse_completion(completion(prompt=prompt, n=2, logprobs=0))
    assert parsed.prompts == prompts
    assert parsed.choices == 2 * len(prompts)
    assert parsed.settings["logprobs"] == 0


def test_parameters_of_vllm() -> None:
    asked: dict[str, Any] = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.3, "ignore_eos": True}
    asked |= {"stop_token_ids": [5, 7], "min_tokens": 3, "allowed_token_ids": [5, 6], "bad_words": ["pen"]}
    assert parse_chat(chat(**asked)).settings == asked
    assert parse_completion(completion(**asked)).settings == {"max_new_tokens": 16, **asked}
    neutral: dict[str, Any] = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": False}
    sampling = parse_chat(chat(**neutral)).sampling(SamplingParams(repetition_penalty=1.3, ignore_eos=True))
    assert sampling == SamplingParams(top_k=0, min_p=0.0, repetition_penalty=1.0)
    with pytest.raises(OpenAIError, match="stop_token_ids must be a list of token ids") as error:
        parse_chat(chat(stop_token_ids=[-1])).sampling(SamplingParams())
    assert (error.value.status, error.value.param) == (400, "stop_token_ids")
    assert parse_chat(chat(top_k=9, top_p=0)).settings == {"top_k": 1}
    with pytest.raises(OpenAIError, match="min_tokens 20 is more than max_new_tokens 16") as error:
        parse_completion(completion(min_tokens=20)).sampling(SamplingParams())
    assert (error.value.status, error.value.param) == (400, "min_tokens")


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("stop_strings", "Unknown parameter: 'stop_strings': use 'stop'.", "unknown_parameter"),
        ("max_new_tokens", "Unknown parameter: 'max_new_tokens': use 'max_tokens'.", "unknown_parameter"),
        ("guided_json", "Unknown parameter: 'guided_json': use 'structured_outputs'.", "unknown_parameter"),
        ("functions", "'functions' is not supported: an endpoint's chats have tools", "unsupported_parameter"),
        ("heat", "Unknown parameter: 'heat'.", "unknown_parameter"),
    ],
)
def test_names_that_clients_bring_along(name: str, message: str, code: str) -> None:
    with pytest.raises(OpenAIError) as error:
        parse_chat(chat(**{name: 5}))
    assert message in error.value.message
    assert (error.value.param, error.value.code) == (name, code)


_MOST_BYTES = 16 << 20
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        (chat(tools=[{"type": "function"}]), "tools", "invalid_type", 'tools of type "function"'),
        (chat(tools={"type": "function"}), "tools", "invalid_type", 'tools of type "function"'),
        (chat(documents=["a"]), "documents", "invalid_value", "a list of objects"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs", "invalid_value", "must be an object"),
        (chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs", "invalid_value", "'chat_template'"),
        (chat(continue_final_message="yes"), "continue_final_message", "invalid_type", "boolean"),
        (chat(modalities=["text", "audio"]), "modalities", "unsupported_value", "audio"),
        (chat(store=True), "store", "unsupported_value", "true"),
        (chat(reasoning_effort="high"), "reasoning_effort", "unsupported_value", "high"),
        (chat(temprature=1), "temprature", "unknown_parameter", "'temprature'"),
        (chat(prompt="x"), "prompt", "unknown_parameter", "'prompt'"),
        ({"model": "m"}, "messages", "missing_required_parameter", "'messages'"),
        ({"messages": HELLO}, "model", "missing_required_parameter", "'model'"),
        (chat(messages=[]), "messages", "invalid_value", "at least 1"),
        (chat(messages=["x"]), "messages[0]", "invalid_type", 'an object, not "x"'),
        (chat(messages={"role": "user"}), "messages", "invalid_type", "a list of messages"),
        (chat(messages=[1] * 500_000), "messages", "invalid_value", "at most 2048 messages, not 500000"),
        (chat(messages=[1] * 2000), "messages[0]", "invalid_type", "an object, not 1"),
        (
            chat(messages=[{"role": "user", "content": [1] * 500_000}]),
            "messages[0].content[0]",
            "unsupported_value",
            "null",
        ),
        (chat(**{str(place): 1 for place in range(100_000)}), "0", "unknown_parameter", "'0'"),
        (chat(**{"x" * 500_000: 1}), "x" * 79 + "…", "unknown_parameter", "xxx…'"),
        (chat(metadata={str(place): 1 for place in range(100_000)}), "metadata", "invalid_type", "texts"),
        (chat(logit_bias={str(place): "x" for place in range(1024)}), "logit_bias", "invalid_value", '"x"'),
        (chat(logit_bias=[1]), "logit_bias", "invalid_type", "[1]"),
        (chat(stop=[1] * 500_000), "stop", "invalid_value", "1, 1, …"),
        (chat(temperature=[1] * 500_000), "temperature", "invalid_type", "1, 1, …"),
        (chat(stream=True, stream_options={"x": 1}), "stream_options.x", "unknown_parameter", "x"),
        (chat(top_k=-2), "top_k", "invalid_value", "-1"),
        (chat(min_p=2), "min_p", "invalid_value", "1"),
        (chat(repetition_penalty=0), "repetition_penalty", "invalid_value", "0.01"),
        (chat(min_tokens=-1), "min_tokens", "invalid_value", "-1"),
        (chat(min_token=3), "min_token", "unknown_parameter", "'min_token'"),
        (chat(messages=[{"role": "function", "content": "x"}]), "messages[0].role", "invalid_value", '"function"'),
        (
            chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 1}]),
            "messages[0].tool_call_id",
            "invalid_type",
            "text",
        ),
        (
            chat(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]),
            "messages[0].tool_calls",
            "unsupported_parameter",
            "",
        ),
        (chat(messages=[called("{")]), "messages[0].tool_calls[0].function", "invalid_type", "an object as JSON text"),
        (
            chat(messages=[called("[1]")]),
            "messages[0].tool_calls[0].function",
            "invalid_type",
            "an object as JSON text",
        ),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter", "content"),
        (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "invalid_type", "5"),
        (
            chat(messages=[{"role": "system", "content": [IMAGE]}]),
            "messages[0].content[0]",
            "unsupported_value",
            "image_url",
        ),
        *(
            (
                chat(messages=[{"role": "user", "content": [image]}]),
                f"messages[0].content[0].image_url{path}",
                code,
                words,
            )
            for image, path, code, words in (
                (IMAGE | {"image_url": "https://example.com/cat.png"}, "", "invalid_type", "an object"),
                (IMAGE | {"image_url": {}}, ".url", "missing_required_parameter", "url"),
                (IMAGE | {"image_url": {"url": "file:///etc/passwd"}}, ".url", "invalid_image_url", "http or https"),
                (IMAGE | {"image_url": {"url": "cat.png"}}, ".url", "invalid_image_url", "data: URI"),
                (IMAGE | {"image_url": {"url": "data:,", "detail": "x"}}, ".detail", "unsupported_value", "auto, low"),
                (IMAGE | {"image_url": {"url": "data:,", "size": 3}}, ".size", "unknown_parameter", "size"),
            )
        ),
        (
            chat(messages=[{"role": "assistant", "tool_calls": [{}]}]),
            "messages[0].tool_calls",
            "invalid_type",
            'calls of type "function"',
        ),
        (chat(temperature=2.5), "temperature", "invalid_value", "less than or equal to 2"),
        (chat(temperature="0.5"), "temperature", "invalid_type", "number"),
        (chat(temperature=True), "temperature", "invalid_type", "number"),
        (chat(temperature=float("nan")), "temperature", "invalid_value", "finite"),
        (chat(n=0), "n", "invalid_value", "1"),
        (chat(max_tokens=0), "max_tokens", "invalid_value", "1"),
        (chat(max_tokens=3, max_completion_tokens=3), "max_tokens", "invalid_parameter_combination", "not both"),
        (chat(top_logprobs=3), "top_logprobs", "invalid_parameter_combination", "logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value", "20"),
        (chat(stop=["a", ""]), "stop", "invalid_value", "non-empty"),
        (
            chat(logit_bias={str(token): 1 for token in range(1025)}),
            "logit_bias",
            "object_above_max_properties",
            "up to 1024 tokens are allowed, not 1025",
        ),
        (chat(stop=["a"] * 5), "stop", "array_above_max_length", "up to 4 strings are allowed, not 5"),
        (chat(stop="a" * 1001), "stop", "string_above_max_length", "up to 1000 characters, not 1001"),
        (chat(logit_bias={"x": 1}), "logit_bias", "invalid_value", '"x"'),
        (chat(logit_bias={"1": 101}), "logit_bias", "invalid_value", "101"),
        (chat(logit_bias={"9" * 5000: 1}), "logit_bias", "invalid_value", "999"),
        (chat(temperature=10**400), "temperature", "invalid_type", "number"),
        (completion(prompt=[1, 2**31]), "prompt", "invalid_type", "2147483648"),
        (chat(stream_options={"include_usage": True}), "stream_options", "invalid_parameter_combination", "stream"),
        (completion(echo=True, stream=True), "echo", "invalid_parameter_combination", "stream"),
        (completion(prompt_logprobs=1, stream=True), "prompt_logprobs", "invalid_parameter_combination", "stream"),
        (chat(prompt_logprobs=21), "prompt_logprobs", "invalid_value", "20"),
        (chat(return_token_ids="yes"), "return_token_ids", "invalid_type", "boolean"),
        (completion(best_of=3), "best_of", "unsupported_value", "3"),
        (completion(suffix="end"), "suffix", "unsupported_value", "end"),
        (completion(prompt=[]), "prompt", "invalid_type", "[]"),
        (completion(prompt=["a", 1]), "prompt", "invalid_type", "list of texts"),
        (completion(logprobs=6), "logprobs", "invalid_value", "5"),
        (completion(messages=HELLO), "messages", "unknown_parameter", "'messages'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str, code: str, words: str) -> None:
    parse = parse_completion if body.get("model") == "davinci" else parse_chat
    tracemalloc.start()
    try:
        with pytest.raises(OpenAIError) as caught:
            parse(body)
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES  # however large it is
    finally:
        tracemalloc.stop()
    error = caught.value.body()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert words in error["message"]
    assert caught.value.status == 400


TEXT = st.text("ab1-é", max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = (*chat(), "temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "prompt", "stream_options")


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.booleans())
def test_no_body_does_harm(changes: dict[str, Any], is_chat: bool) -> None:
    """Anything that JSON can hold is a request or an error of OpenAI's."""
    parse = parse_chat if is_chat else parse_completion
    try:
        assert parse({**(chat() if is_chat else completion()), **changes}).choices >= 1
    except OpenAIError as error:
        assert error.message  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(OpenAIError, match="not a JSON object"):
        parse_chat(body)


def test_images_are_taken_out_of_messages() -> None:
    said = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Which?"}, IMAGE]}]
    parsed = parse_chat(chat(messages=said))
    assert parsed.images == ("https://example.com/cat.png",) * 2
    (prompt,) = parsed.prompts
    place = {"type": "image"}
    assert prompt == Conversation([{"role": "user", "content": [place, {"type": "text", "text": "Which?"}, place]}])
    assert parse_chat(chat()).images == ()
