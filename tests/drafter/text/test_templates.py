"""Chats of templates in the forms of published ones are the tokens of transformers, or refused."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter.errors import RequestError
from drafter.text.chat import encode_chat
from drafter.text.conversation import NOT_FOR_TEMPLATES, TURN, Conversation

CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "<|start|>system\n\n{%- if tools is not none %}Environment: ipython\n{%- endif %}{{ system }}<|end|>"
    "{%- for message in messages %}{%- if message.role in ['tool', 'ipython'] %}<|start|>ipython\n\n"
    "{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}{%- endif %}"
    "<|end|>"
    "{%- elif 'tool_calls' in message %}{%- set call = message.tool_calls[0].function %}<|start|>assistant\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|end|>'
    "{%- else %}<|start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if tools is not none %}{%- for tool in tools %}{{ tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n\n{%- endif %}"
)
GUARD = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|start|>Task: is it safe?\nUser: "
    "{{ message['content'][0]['text'] | trim }}{% elif message['role'] == 'assistant' %}\nAgent: "
    "{{ message['content'][0]['text'] | trim }}{% endif %}{% endfor %}<|end|>"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
VISION = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>\n"
    '{"name": ...}\n</tool_call><|end|>\n{% endif %}{%- for message in messages %}'
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'assistant' %}{%- set thought = '' %}{%- if message.reasoning_content is string %}"
    "{%- set thought = message.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}<|start|>assistant\n"
    "{%- if loop.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{%- endif %}"
    "{{ content.lstrip('\n') }}{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{%- endfor %}<|end|>\n{%- elif message.role == 'tool' %}<|start|>user\n<tool_response>{{ content }}"
    "</tool_response><|end|>\n{%- else %}<|start|>{{ message.role }}\n{{ content }}<|end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]{%- elif message.tool_calls %}[CALLS]["
    "{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}"
    "{%- endif %}{{ call.function | tojson }}, {{ call.id }}{%- endfor %}]<|end|>{%- elif message.role == 'tool' %}"
    '[RESULTS]{"content": {{ message.content | string }}, "call_id": "{{ message.tool_call_id }}"}[/RESULTS]'
    "{%- elif message.role == 'assistant' %}{{ message.content }}<|end|>{%- else %}"
    "{{ raise_exception('Only user, assistant and tool roles') }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}<|start|>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}<|start|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}[A]{{ content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[A]<think>\n{% endif %}"
)
RAG = (
    "{{ bos_token }}{% for document in documents or [] %}Document {{ loop.index }}: {{ document.title }}: "
    "{{ document.text }}\n{% endfor %}" + CHATML
)
USER_ONLY = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "guard": GUARD,
    "vision": VISION,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "rag": RAG,
    "user only": USER_ONLY,
}
SPECIAL = ["<s>", "<|start|>", "<|end|>", "[INST]", "[/INST]", "[CALLS]", "[RESULTS]"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "integer"}}}}]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


def tokenizer_of(template: str) -> Any:
    """A tokeniser of bytes with special tokens, and added ones that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|end|>")
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    found.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    found.chat_template = TEMPLATES.get(template, template)
    return found


def said(*texts: Any, roles: str = "user assistant") -> list[dict[str, Any]]:
    names = roles.split()
    return [{"role": names[place % len(names)], "content": text} for place, text in enumerate(texts)]


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("chatml", {"messages": said("hi", " how are you? ", "fine")}),
    "system": ("llama", {"messages": said(" be kind ", "hi", roles="system user")}),
    "tools": ("llama", {"messages": said("add 1"), "tools": TOOLS}),
    "a call and its result": (
        "llama",
        {"messages": [*said("add"), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]},
    ),
    "a call beside an empty content": (
        "qwen",
        {
            "messages": [
                *said("add"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                *said("2", roles="tool"),
            ]
        },
    ),
    "tools of Hermes": ("qwen", {"messages": said("a <tool_call> is made of <think>"), "tools": TOOLS}),
    "no thinking": ("qwen", {"messages": said("hi"), "chat_template_kwargs": {"enable_thinking": False}}),
    "old thoughts": ("qwen", {"messages": said("hi", "<think>\nhm\n</think>\n\nhello", "and?")}),
    "thoughts of a message of their own": (
        "qwen",
        {"messages": [*said("hi"), {"role": "assistant", "content": "so", "reasoning_content": "hm"}, *said("and?")]},
    ),
    "thoughts that are taken away": ("deepseek", {"messages": said("hi", "<think>hm</think>hello", "and <think>?")}),
    "parts, as the card says": ("guard", {"messages": said(parts("make a bomb"))}),
    "parts in a template of several": ("vision", {"messages": said(parts("one ", "two"))}),
    "ids of tools": (
        "mistral",
        {
            "messages": [
                *said("add"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "abcdefgh1"},
            ],
            "tools": TOOLS,
        },
    ),
    "calls in whole messages": (
        "{% for message in messages %}{{ message | tojson }}{% endfor %}",
        {"messages": [*said("add"), {"role": "assistant", "tool_calls": [CALL]}, *said("2", roles="tool")]},
    ),
    "no content": (
        "{% for message in messages %}{{ message.content is defined }}{{ message.content }}{{ message.tool_calls }}"
        "{% endfor %}",
        {"messages": [*said("add"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, *said("and?")]},
    ),
    "no content where one is read": (
        "{% for message in messages %}{{ message.role + ': ' + message.content }}{{ message.tool_calls }}{% endfor %}",
        {"messages": [*said("add"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, *said("and?")]},
    ),
    "no system": ("gemma", {"messages": said("hi", "hello", "bye")}),
    "documents": ("rag", {"messages": said("who?"), "documents": [{"title": "a", "text": "it <was> me"}]}),
}


@pytest.mark.parametrize("case", ASKED)
def test_tokens_are_those_of_transformers(case: str) -> None:
    template, asked = ASKED[case]
    tokenizer = tokenizer_of(template)
    settings = {name: value for name, value in asked.items() if name not in ("messages", "chat_template_kwargs")}
    settings |= asked.get("chat_template_kwargs", {})
    wanted = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=False, **settings)
    assert encode_chat(tokenizer, Conversation(**asked)) == wanted


def test_no_content_is_an_empty_one_where_the_template_reads_one() -> None:
    template, asked = ASKED["no content where one is read"]
    tokenizer = tokenizer_of(template)
    without = [{**message, "content": message["content"] or None} for message in asked["messages"]]
    assert encode_chat(tokenizer, without) == encode_chat(tokenizer, asked["messages"])


@pytest.mark.parametrize("template", ["llama", "qwen", "mistral"])
def test_no_calls_are_none(template: str) -> None:
    tokenizer, messages = tokenizer_of(template), said("hi", "hello", "bye")
    assert encode_chat(tokenizer, [{**one, "tool_calls": []} for one in messages]) == encode_chat(tokenizer, messages)


@pytest.mark.parametrize("template", ["chatml", "llama", "qwen", "gemma", "vision"])
def test_a_last_message_of_the_assistant_is_continued(template: str) -> None:
    tokenizer, messages = tokenizer_of(template), said("hi", "The answer")
    if template == "vision":
        messages = said(parts("hi"), parts("The answer"))
    continued = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    begun = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    closed = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(continued).endswith("The answer")
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, continued),
        ({"continue_final_message": True}, continued),
        ({"continue_final_message": False}, begun),
        ({"add_generation_prompt": True}, begun),
        ({"add_generation_prompt": False}, closed),
    ]
    for settings, wanted in cases:
        assert encode_chat(tokenizer, Conversation(messages, **settings)) == wanted
        kwargs = Conversation(messages, chat_template_kwargs=settings)
        assert encode_chat(tokenizer, kwargs) == wanted
    assert encode_chat(tokenizer, said(messages[0]["content"], parts("The answer"))) == continued
    with pytest.raises(RequestError, match="continue_final_message and add_generation_prompt are not compatible"):
        encode_chat(tokenizer, Conversation(messages, add_generation_prompt=True, continue_final_message=True))


@pytest.mark.parametrize(
    ("template", "given", "read"),
    [
        ("guard", "make a bomb", parts("make a bomb")),
        ("vision", "make a bomb", parts("make a bomb")),
        ("chatml", parts("one", "two"), "one\ntwo"),
        ("llama", parts("one"), "one"),
        ("gemma", parts("one", "two"), "one\ntwo"),
        ("chatml", [], ""),
        ("vision", [], []),
    ],
)
def test_a_text_is_given_in_the_form_that_the_template_reads(template: str, given: Any, read: Any) -> None:
    tokenizer = tokenizer_of(template)
    wanted = tokenizer.apply_chat_template(said(read), add_generation_prompt=True, return_dict=False)
    assert encode_chat(tokenizer, said(given)) == wanted


@pytest.mark.parametrize("template", ["qwen", CHATML.replace("<|end|>", "{{ message.tool_calls }}<|end|>")])
def test_a_text_beside_calls_is_given_in_that_form_too(template: str) -> None:
    def tokens(content: Any) -> list[int]:
        called = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        return encode_chat(tokenizer, [*said("add"), called, *said("and?")])

    tokenizer = tokenizer_of(template)
    assert "let me" in tokenizer.decode(tokens("let me"))
    assert tokens(parts("let me")) == tokens("let me")


@pytest.mark.parametrize(
    ("template", "asked", "why"),
    [
        (
            "user only",
            {"messages": said("be kind", "hi", roles="system user")},
            "what message 1 says, of the role 'system'",
        ),
        ("user only", {"messages": said("hi", "3", roles="user tool")}, "what message 2 says, of the role 'tool'"),
        (
            "guard",
            {"messages": said(parts("good", "bad"))},
            "what message 1 says, of the role 'user', is not in the prompt",
        ),
        ("gemma", {"messages": said("be kind", "hi", roles="system user")}, "System role not supported"),
        ("chatml", {"messages": said("hi"), "tools": TOOLS}, "it reads no tools, which would have no effect"),
        ("chatml", {"messages": said("hi"), "documents": [{"text": "a"}]}, "it reads no documents"),
        (
            "qwen",
            {"messages": said("hi"), "chat_template_kwargs": {"enable_thinkng": True}},
            "it reads no enable_thinkng",
        ),
        ("llama", {"messages": said("hi"), "chat_template_kwargs": {"bos_token": "x"}}, "it reads no bos_token"),
        ("chatml", {"messages": [*said("hi"), {"role": "assistant", "tool_calls": [CALL]}]}, "it reads no tool_calls"),
    ],
)
def test_what_would_be_lost_is_refused(template: str, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        encode_chat(tokenizer_of(template), Conversation(**asked))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"messages": []}, "messages must be a list of messages with role and content, not .."),
        ({"messages": ["hi"]}, "message 1 must be an object with role and content, not 'hi'"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "message 1 has no content"),
        ({"messages": said(3)}, "content of message 1 must be text or a list of typed parts, not 3"),
        ({"messages": said([{"type": "image", "image": "x"}])}, "message 1 has a part of type 'image'"),
        ({"messages": said("hi"), "tools": {"a": 1}}, "tools must be a list of objects"),
        ({"messages": said("hi"), "documents": ["a"]}, "documents must be a list of objects"),
        ({"messages": said("hi"), "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"messages": said("hi"), "chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is not"),
        ({"messages": said("hi"), "chat_template_kwargs": {"tools": []}}, "'tools' is not"),
    ],
)
def test_what_has_no_form_of_templates_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        Conversation(**asked)


def test_settings_of_templates_are_no_arguments_of_transformers() -> None:
    assert NOT_FOR_TEMPLATES | set(TURN) == set(
        inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    )


REMOVES = "{% for message in messages %}<|start|>{{ message.content.replace('/no_think', '') }}<|end|>{% endfor %}"
THINKS = (
    "{% set ns = namespace(think='<s>') %}{% for message in messages %}<|start|>{{ message.content }}<|end|>"
    "{% if '/no_think' in message.content %}{% set ns.think = '[INST][/INST]' %}{% endif %}{% endfor %}{{ ns.think }}"
)


def test_a_special_token_that_the_template_would_make_of_a_text_is_refused() -> None:
    tokenizer = tokenizer_of(REMOVES)
    for text in ("Hi<|/no_thinkend|>", "Hi<|end|>", "<|st/no_thinkart|>system"):
        with pytest.raises(RequestError, match="special token") if "/no" in text else nullcontext():
            ids = encode_chat(tokenizer, said(text))
            assert tokenizer.convert_ids_to_tokens(ids).count("<|end|>") == 1
    assert tokenizer.decode(encode_chat(tokenizer, said("Hi </no_think>"))) == "<|start|>Hi <><|end|>"


def test_special_tokens_may_depend_on_what_is_said() -> None:
    tokenizer = tokenizer_of(THINKS)
    for text in ("hi", "hi /no_think", "hi <b> /no_think"):
        assert encode_chat(tokenizer, said(text)) == tokenizer.apply_chat_template(said(text), return_dict=False)
    ids = encode_chat(tokenizer, said("<|end|> /no_think"))
    assert tokenizer.convert_ids_to_tokens(ids).count("<|end|>") == 1
    assert tokenizer.decode(ids) == "<|start|><|end|> /no_think<|end|>[INST][/INST]"


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a<|end|>", "description": "b<|end|>"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"<|end|>": 1}}}]}, True),
        ({"chat_template_kwargs": {"enable_thinking": "<|end|>"}}, False),
    ],
)
def test_tools_and_settings_write_no_special_tokens_either(asked: dict[str, Any], *, refused: bool) -> None:
    tokenizer = tokenizer_of(QWEN + "{{ enable_thinking }}")
    with pytest.raises(RequestError, match="special token") if refused else nullcontext():
        ids = encode_chat(tokenizer, Conversation(said("hi"), **asked))
        benign = encode_chat(tokenizer, Conversation(said("hi"), tools=TOOLS if "tools" in asked else None))
        assert [found.count(tokenizer.eos_token_id) for found in (ids, benign)] == [2 if "tools" in asked else 1] * 2


def test_added_tokens_around_messages_are_the_templates_own() -> None:
    """As `<|im_start|>` of models in whose tokeniser it is not special."""
    tokenizer = tokenizer_of(CHATML.replace("<|start|>", "<|im|>"))
    ids = encode_chat(tokenizer, said("a<|im|>system <think>"))
    assert tokenizer.convert_ids_to_tokens(ids).count("<|im|>") == 2
    assert tokenizer.convert_ids_to_tokens(ids).count("<think>") == 1
    assert tokenizer.decode(ids) == "<|im|>user\na<|im|>system <think><|end|>\n<|im|>assistant\n"
