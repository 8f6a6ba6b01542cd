"""Calls of functions in texts of the usual forms, whole and cut short, in one piece and in many."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.calls import CallForm
from drafter.text.call_marks import CallMarks
from pipeline.openai.tool_calls import CallDelta, CallReader, Delta, call_chunk, call_id, read_message


class Tokenizer:
    """Whose added tokens are these, special or not."""

    def __init__(self, **added: bool) -> None:
        tokens = [SimpleNamespace(content=name, special=special) for name, special in added.items()]
        self.added_tokens_decoder = dict(enumerate(tokens))


TAGGED = CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
TAGS = ("<tool_call>", "</tool_call>")
HERMES = CallMarks.of(Tokenizer(), TAGGED)
TOKENS = CallMarks.of(Tokenizer(**dict.fromkeys(TAGS, False)), TAGGED)
HIDDEN = CallMarks.of(Tokenizer(**dict.fromkeys(TAGS, True)), TAGGED)
MISTRAL = CallMarks.of(Tokenizer(**{"[TOOL_CALLS]": True, "<s>": True}), CallForm("[TOOL_CALLS]", " [", ", ", "]"))
LLAMA = CallMarks.of(
    Tokenizer(**{"<|python_tag|>": True}), CallForm("<|python_tag|>", arguments="parameters", bare=True)
)
FORMS = {"hermes": HERMES, "tokens": TOKENS, "hidden": HIDDEN, "mistral": MISTRAL, "llama": LLAMA}
NAMES = ("add", "add_all")


def written(marks: CallMarks, *calls: tuple[str, Any]) -> str:
    """The marked text of an output with calls."""
    form = marks.form
    texts = [form.head(name) + json.dumps(arguments) + "}" for name, arguments in calls]
    return ("" if form.bare else form.marker) + form.first + (form.between or "").join(texts) + form.last


def joined(deltas: list[Delta]) -> tuple[str, list[list[str]]]:
    """Text beside the calls, and the names and arguments of these."""
    content, calls = "", list[list[str]]()
    for delta in deltas:
        if isinstance(delta, str):
            content += delta
        elif delta.name is not None:
            assert delta == CallDelta(len(calls), delta.name)
            calls.append([delta.name, ""])
        else:
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    return content, calls


def read(form: CallMarks, *pieces: str) -> tuple[str, list[list[str]], bool]:
    reader = CallReader(form, NAMES)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.close()
    assert all(delta for delta in deltas)
    return (*joined(deltas), reader.whole)


ARGUMENTS = {"x": [1, {"y": '}"]\\'}], "é": "{"}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_call(form: CallMarks) -> None:
    assert read(form, written(form, ("add", ARGUMENTS))) == ("", [["add", json.dumps(ARGUMENTS)]], True)
    assert read(form, "\n\n" + written(form, ("add_all", {}))) == ("", [["add_all", "{}"]], True)


@pytest.mark.parametrize("form", [HERMES, TOKENS, HIDDEN, MISTRAL], ids=["hermes", "tokens", "hidden", "mistral"])
def test_several_calls_after_a_text(form: CallMarks) -> None:
    text = "I add.\n\n" + written(form, ("add", {"x": 1}), ("add_all", {}), ("add", {"x": 2}))
    assert read(form, text) == ("I add.", [["add", '{"x": 1}'], ["add_all", "{}"], ["add", '{"x": 2}']], True)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call  \n"),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "add"'),
        (TOKENS, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        (HIDDEN, 'hello \n{"name": "add", "arguments": {"zz'),
        (MISTRAL, ' [{"name": "add", "arguments": {}}]'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'),
        (LLAMA, 'Write {"name": "add", "parameters": {}}'),
        (LLAMA, '{"names": 1}'),
        (LLAMA, '{"name": "other", "parameters": {}}'),
        (LLAMA, " \n"),
        (LLAMA, ""),
    ],
)
def test_what_is_no_call_is_text(form: CallMarks, text: str) -> None:
    assert read(form, text) == (text, [], False)
    assert read(form, *text) == (text, [], False)


def test_a_text_with_the_beginning_of_a_call_before_one() -> None:
    text = "<tool_call> is how\n" + written(HERMES, ("add", {}))
    assert read(HERMES, text) == ("<tool_call> is how", [["add", "{}"]], True)


def test_a_call_that_is_cut_short_has_the_arguments_until_there() -> None:
    text = written(HERMES, ("add", {"x": "abc"}))
    assert read(HERMES, text[: text.index("bc")]) == ("", [["add", '{"x": "a']], False)
    assert read(HERMES, text[: text.index("}}") + 1]) == ("", [["add", '{"x": "abc"}']], True)
    both = written(HERMES, ("add", {}), ("add", {"x": 1}))
    assert read(HERMES, both[: both.index('"x"') + 1]) == ("", [["add", "{}"], ["add", '{"']], False)
    assert read(HERMES, both[: both.rindex("<tool_call>") + 4]) == ("", [["add", "{}"]], True)


def test_the_mark_alone_is_seen_as_it_is_or_not_at_all() -> None:
    mark, hidden, other = TOKENS.form.marker, HIDDEN.form.marker, MISTRAL.tokens[1]
    assert read(TOKENS, "Well. ", mark, "x") == ("Well. <tool_call>x", [], False)
    assert read(HIDDEN, "Well. ", hidden, "x") == ("Well. x", [], False)
    assert read(MISTRAL, f' [{{"na{other}me": "add", "arguments": {{}}}}]') == (
        ' [{"name": "add", "arguments": {}}]',
        [],
        False,
    )
    for text in ("<|python_tag|>", " <|python_tag|>"):
        marked = text.replace("<|python_tag|>", LLAMA.form.marker)
        assert read(LLAMA, marked + written(LLAMA, ("add", {}))) == ("", [["add", "{}"]], True)
        assert read(LLAMA, *marked) == ("", [], False)


CALLS = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2))


@given(
    st.sampled_from([*FORMS]),
    st.text('<tol_ca>{[\n "', max_size=12),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2)),
        max_size=3,
    ),
    st.integers(0, 400),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_pieces_give_what_the_whole_gives(
    kind: str, before: str, calls: list[tuple[str, Any]], end: int, cuts: list[int]
) -> None:
    form = FORMS[kind]
    if form.form.bare:
        before, calls = before.strip() and before, calls[:1]
    text = (before + written(form, *calls) if calls else before)[: end or None]
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    assert read(form, *pieces) == read(form, text)


@given(st.text(max_size=60))
def test_no_text_is_lost_where_nothing_is_called(text: str) -> None:
    for form in FORMS.values():
        assert read(form, *text) == (text, [], False)


def test_a_message() -> None:
    message, whole = read_message(HERMES, NAMES, "Well. " + written(HERMES, ("add", {"x": 1})), "chatcmpl-1:0")
    assert whole
    assert message == {
        "role": "assistant",
        "content": "Well.",
        "refusal": None,
        "tool_calls": [
            {
                "id": call_id("chatcmpl-1:0", 0),
                "type": "function",
                "function": {"name": "add", "arguments": '{"x": 1}'},
            }
        ],
    }
    assert read_message(HERMES, NAMES, written(HERMES, ("add", {})), "a")[0]["content"] is None
    assert read_message(HERMES, NAMES, "", "a") == ({"role": "assistant", "content": "", "refusal": None}, False)


def test_chunks() -> None:
    assert call_chunk("a", "x") == {"content": "a"}
    begun = {"index": 1, "id": call_id("x", 1), "type": "function", "function": {"name": "f", "arguments": ""}}
    assert call_chunk(CallDelta(1, "f"), "x") == {"tool_calls": [begun]}
    assert call_chunk(CallDelta(1, None, "{"), "x") == {"tool_calls": [{"index": 1, "function": {"arguments": "{"}}]}


def test_ids_are_those_that_mistrals_templates_take() -> None:
    ids = {call_id(answer, index) for answer in ("a", "b") for index in range(50)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
