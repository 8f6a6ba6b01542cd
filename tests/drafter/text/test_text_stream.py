"""What an output says is the same in one piece and in many, and its marks are tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.calls import CallForm, Calls
from drafter.requests import SamplingParams
from drafter.structured_outputs import CallOutputs, StructuredOutputs
from drafter.text.text_stream import OutputText, TextStream, read_output
from tests.support.marking import DECODERS, MARKS, TOKENIZERS, WORDS, ids_of, made
from tests.support.properties import examples

HERMES = CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
MISTRAL = CallForm("[TOOL_CALLS]", " [", ", ", "]")


def calling(form: CallForm) -> StructuredOutputs:
    return CallOutputs(calls=Calls(form, (("f", "{}"),), otherwise=""))


ASKED = [None, StructuredOutputs(choice=[" yes"]), calling(HERMES), calling(MISTRAL)]  # type: ignore[arg-type]


def read(tokenizer: Any, *words: str, prompt: tuple[str, ...] = ("a",), **sampling: Any) -> tuple[str | None, str]:
    found = read_output(tokenizer, ids_of(tokenizer, *prompt), ids_of(tokenizer, *words), SamplingParams(**sampling))
    return found.reasoning, found.text


@pytest.fixture(params=TOKENIZERS.items(), ids=lambda one: "-".join(one[0]))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param[1]


@pytest.fixture(params=[key for key in TOKENIZERS if key[1] != "text"], ids="-".join)
def marking(request: pytest.FixtureRequest) -> Any:
    """A tokeniser whose marks are tokens."""
    return TOKENIZERS[request.param]


def test_reasoning_is_what_stands_between_its_marks(tokenizer: Any) -> None:
    seen = "" if special(tokenizer) else "{}"
    answers = {
        ("<think>", "a", "b", "</think>", "\n", "\n", "b", "▁a"): ("ab", "b a"),
        ("\n", "<think>", "a", "</think>", "b"): ("a", "b"),
        ("<think>", "</think>", "b"): ("", "b"),
        ("<think>", "a"): ("a", ""),
        ("a", "<think>", "b"): ("", f"a{seen}b".format("<think>")),
        ("b", "▁a", "<s>"): ("", "b a"),
        ("<think>", "a", "</think>", "b", "</think>", "b"): ("a", f"b{seen}b".format("</think>")),
    }
    assert {words: read(tokenizer, *words) for words in answers} == answers
    prompts: list[tuple[str, ...]] = [("a", "<think>"), ("<think>", "a", "</think>", "<s>", "<think>", "\n")]
    for prompt in prompts:
        assert read(tokenizer, "a", "</think>", "\n", "b", prompt=prompt) == ("a", "b")
        assert read(tokenizer, "<s>", "a", prompt=prompt) == ("a", "")
    for over in (("<think>", "\n", "</think>", "\n"), ("a", "</think>")):
        assert read(tokenizer, "\n", "b", prompt=over) == ("", "\nb")


def special(tokenizer: Any) -> bool:
    return "<think>" in tokenizer.all_special_tokens or any(
        one.special for one in tokenizer.added_tokens_decoder.values() if one.content == "<think>"
    )


def test_what_somebody_has_said_before_a_special_token_begins_no_reasoning(tokenizer: Any) -> None:
    assert read(tokenizer, "b", prompt=("<think>", "a", "<s>", "a")) == ("", "b")


def test_a_spelled_mark_is_text_where_marks_are_tokens(marking: Any) -> None:
    spelled = [*"<think>"], [*"</think>"]
    assert read(marking, *spelled[0], "a", *spelled[1], "b") == ("", "<think>a</think>b")
    assert read(marking, "<think>", "a", *spelled[1], "b", "</think>", "a") == ("a</think>b", "a")


def test_a_stop_string_is_looked_for_in_the_answer(tokenizer: Any) -> None:
    words = ("<think>", "a", "\n", "b", "</think>", "\n", "b", "a", "\n", "b")
    for stop, text in (("b", ""), ("\n", "ba"), ("a", "b"), ("</think>", "ba\nb"), ("ab", "ba\nb")):
        assert read(tokenizer, *words, stop=stop) == ("a\nb", text)
    assert read(tokenizer, "\n", "b", stop="\n") == ("", "")
    assert read(tokenizer, "\n", stop="\n") == ("", "")
    early = len(ids_of(tokenizer, *words[:8]))
    assert read(tokenizer, *words, stop="b", min_tokens=early) == ("a\nb", "ba\n")


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_a_grammar_accepts_is_the_text_to_the_character(decoder: str) -> None:
    for cleans in (False, True):
        tokenizer = made(decoder, "special", cleans=cleans)
        yes = StructuredOutputs(choice=[" yes"])  # type: ignore[arg-type]
        assert read(tokenizer, "▁yes", "<s>", structured_outputs=yes) == ("", " yes")
        assert read(tokenizer, "▁", "▁yes", "▁.", structured_outputs=yes) == ("", "  yes .")
        assert read(tokenizer, "<think>", "a", "</think>", "▁yes", structured_outputs=yes) == ("a", " yes")
        assert read(tokenizer, "\n", "<think>", structured_outputs=yes) == ("", "\n")
        # Without one it is that of transformers' `decode`.
        words = ids_of(tokenizer, "▁yes", "▁.", "a")
        assert read_output(tokenizer, [2], words, SamplingParams()).text == tokenizer.decode(words)


def pushed(tokenizer: Any, prompt: list[int], ids: list[int], sizes: Iterator[int], sampling: SamplingParams) -> Any:
    """What a stream gives, joined, and the tokens that it has taken."""
    stream, parts, start = TextStream(tokenizer, prompt, sampling), list[OutputText](), 0
    while start < len(ids):
        end = start + next(sizes)
        for token in ids[start:end]:
            stream.push(token)
            start += 1
            if stream.found:
                break
        if stream.found:
            break
        parts.append(stream.new())
    parts.append(stream.rest())
    assert stream.rest() == OutputText("", "", "")
    names = ("reasoning", "text", "marked")
    return [*("".join(getattr(one, name) for one in parts) for name in names)], stream.whole(), ids[:start]


@pytest.mark.parametrize("key", TOKENIZERS, ids="-".join)
@examples(120)
@given(data=st.data())
def test_pieces_give_what_the_whole_gives(key: tuple[str, str], data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[key]
    words = st.sampled_from([*WORDS, *MARKS, *MARKS, "\n", "<", ">", "/think"])
    ids = ids_of(tokenizer, *data.draw(st.lists(words, max_size=24)))
    prompt = ids_of(tokenizer, *data.draw(st.sampled_from([["a"], ["a", "<think>"], ["a", "</think>", "\n"]])))
    stops = data.draw(st.sampled_from([(), ("ab",), ("\n", "</s"), ("<s>", "<tool"), ("think", "a.", "€")]))
    asked = data.draw(st.sampled_from(ASKED))
    sampling = SamplingParams(stop=stops, min_tokens=data.draw(st.integers(0, 6)), structured_outputs=asked)
    sizes = iter(lambda: data.draw(st.integers(1, 5)), 0)
    joined, whole, taken = pushed(tokenizer, prompt, ids, sizes, sampling)
    assert joined == [whole.reasoning, whole.text, whole.marked]
    assert whole == read_output(tokenizer, prompt, taken, sampling)
    if asked is None and "<think>" not in tokenizer.decode([*prompt, *taken]):
        assert tokenizer.decode(taken, skip_special_tokens=True).startswith(whole.text)
