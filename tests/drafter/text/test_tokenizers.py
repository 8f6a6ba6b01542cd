"""Guards: a tokeniser that panics or a template without end affects one prompt."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter.errors import LoadError, PromptTooLongError, RequestError
from drafter.text import sandbox
from drafter.text.chat import encode_chat, encode_chats, render_chat
from drafter.text.sandbox import bounded_template
from drafter.text.tokenizers import (
    load_tokenizer,
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
    monkeypatch.setattr(sandbox, "_SECONDS", 0.2 if template == LOOPS else 60.0)
    monkeypatch.setattr(sandbox, "_BYTES", 64 << 20)
    monkeypatch.setattr(sandbox, "_LARGEST", 1 << 40)  # a quick machine reaches it before it looks at its memory
    tokenizer, before = panicking(), sys.gettrace()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match=f"the chat template does not take these messages: it {why}"):
        render_chat(tokenizer, said("hi"))
    assert sys.gettrace() is before
    with bounded_template():
        assert sum(range(10)) == 45


HUGE = "3000000000"


@pytest.mark.parametrize(
    "operation",
    [
        f"'a' * {HUGE}",
        f"[0] * {HUGE}",
        f"10 ** {HUGE}",
        f"'a'.center({HUGE})",
        f"['a'] | map('center', {HUGE}) | list",
        f"'%{HUGE}d' % 1",
        f"'%*d' % ({HUGE}, 1)",
        f"'{{:>{HUGE}}}'.format(1)",
        f"'{{:>{{w}}}}'.format(1, w={HUGE})",
        f"1 | tojson(indent={HUGE})",
        "range(99999) | join('a' * 99999)",
        "('a' * 99999).replace('a', 'b' * 99999)",
        "big ~ big ~ big",
        "big + big + big",
        "[nested, nested, nested]",
        "nested | tojson",
        "looped()",
    ],
)
def test_an_operation_that_makes_much_of_little_is_refused(operation: str) -> None:
    tokenizer = panicking()
    tokenizer.chat_template = (
        "{% set big = 'a' * 60000000 %}{% set ns = namespace(nested=['a' * 100000]) %}{% for n in range(12) %}"
        "{% set ns.nested = [ns.nested, ns.nested] %}{% endfor %}{% set nested = ns.nested %}"
        "{% macro looped() %}{% for n in range(9) %}{{ big }}{% endfor %}{% endmacro %}{{ " + operation + " }}"
    )
    with pytest.raises(RequestError, match="it makes more than 128 million characters at once"):
        render_chat(tokenizer, said("hi"))


def test_what_templates_do_is_not_refused() -> None:
    tokenizer = panicking()
    tokenizer.chat_template = (
        "{{ 3 * 4 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ '%3d|%s' % (7, 'x') }} {{ '{:>3}'.format(7) }} {{ 1700000000 }} "
        "{{ {'at': 1700000000} | tojson }} {{ '%d' % 1700000000 }} "
        "{{ messages | map(attribute='content') | join(', ') }} "
        "{{ 'a' ~ 1 ~ none ~ nothing }} {{ [1] + [2] }}"
    )
    wanted = '12 --- 1024   7|x   7 1700000000 {"at": 1700000000} 1700000000 hi a1None [1, 2]'
    assert render_chat(tokenizer, said("hi")).text == wanted


@pytest.mark.parametrize(
    ("normalizer", "fits"),
    [
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]), True),
        (normalizers.Sequence([normalizers.Replace("\n", "<n>"), normalizers.Replace("\t", "<|tab|>")]), True),
        (normalizers.Replace("é", "e" * 1000), False),
        (normalizers.Replace(Regex("[é]"), "e" * 1000), False),
        (normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "a" * 60)] * 2)] * 9), False),
        (normalizers.Sequence([normalizers.Replace("é", "ab" * 9), normalizers.Replace("b", "e" * 50)]), False),
    ],
)
def test_a_normaliser_that_multiplies_is_refused_at_once(normalizer: Any, *, fits: bool, tmp_path: Path) -> None:
    tokenizer = panicking()
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.save_pretrained(tmp_path)
    with nullcontext() if fits else pytest.raises(LoadError, match="more than 64 characters of one"):
        load_tokenizer(tmp_path)
