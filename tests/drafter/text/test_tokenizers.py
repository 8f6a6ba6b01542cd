"""Guards: a tokeniser that panics or a template without end affects one prompt."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter.errors import PromptTooLongError, RequestError
from drafter.text import tokenizers
from drafter.text.chat import encode_chat, encode_chats, render_chat
from drafter.text.tokenizers import (
    bounded_template,
    refuse_endless,
    refuse_panics,
    tokenise,
)


def test_a_text_that_cannot_be_short_enough_is_refused_before_it_is_tokenised() -> None:
    refuse_endless("x" * 4_000, max_length=100, longest=10)
    complaint = "the prompt has 4001 characters, but prompt and output together may have 100 tokens"
    with pytest.raises(PromptTooLongError, match=complaint):
        refuse_endless("x" * 4_001, max_length=100, longest=10)


PANICS = "a" * 40 + "c"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


def panicking() -> Any:
    """A tokeniser whose regular expression gives up on some texts."""
    made = Tokenizer(models.BPE(vocab={"a": 0, "c": 1, "h": 2, "i": 3}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    found.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return found


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_panic_is_an_error_of_one_text() -> None:
    tokenizer = panicking()
    with pytest.raises(RequestError, match=r"the tokenizer of the model fails on this text .*retry-limit"):
        tokenise(tokenizer, [PANICS])
    assert tokenise(tokenizer, ["hi"])["input_ids"] == [[2, 3]]
    found = encode_chats(tokenizer, [render_chat(tokenizer, said(text)) for text in ("hi", PANICS, "ac")])
    assert (found[0], found[2]) == ([2, 3], [0, 1])
    assert isinstance(found[1], RequestError)
    with pytest.raises(RequestError, match="fails on this text"):
        encode_chat(tokenizer, said(PANICS))


def test_who_stops_the_program_is_not_held_up() -> None:
    with pytest.raises(KeyboardInterrupt), refuse_panics():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("template", "why"), [(LOOPS, "takes more than 0.2 seconds"), (GROWS, "takes more than 64 MiB of memory")]
)
def test_a_template_that_does_not_end_or_grows_is_stopped(
    template: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_SECONDS", 0.2 if template == LOOPS else 60.0)
    monkeypatch.setattr(tokenizers, "_BYTES", 64 << 20)
    tokenizer, before = panicking(), sys.gettrace()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match=f"the chat template does not take these messages: it {why}"):
        render_chat(tokenizer, said("hi"))
    assert sys.gettrace() is before
    with bounded_template():
        assert sum(range(10)) == 45
