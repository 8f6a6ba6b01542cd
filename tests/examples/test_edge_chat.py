"""A device's chat: answers in a terminal, with what is not confirmed in grey."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from drafter import EngineConfig, SpeculativeLM
from drafter.errors import printable
from examples.edge_chat import Screen, main
from pipeline.serving.config import EdgeConfig
from pipeline.serving.replica import Answers
from tests.pipeline.conftest import model as model  # a small model with a chat template
from tests.pipeline.conftest import plain as plain
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_grey_text_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    screen = Screen(Terminal())
    for text, expected in (("ab", " cd"), ("", " ce\nf"), (" ce\n", "0123456789abcdef"), ("0\x1b[31m", "1")):
        screen.show(text, expected)
    grey, plain = "\x1b[90m", "\x1b[0m"
    assert screen._stream.getvalue() == (  # type: ignore[attr-defined]
        f"ab{grey} cd{plain}\x1b[3D\x1b[K{grey} ce{plain}\x1b[3D\x1b[K ce\n{grey}0123456789a{plain}"
        f"\x1b[11D\x1b[K0\\x1b[31m{grey}1{plain}"
    )


def test_a_chat(
    model: Path, plain: SpeculativeLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge, config = EdgeConfig(sessions=1), EngineConfig(max_num_seqs=2, num_draft_tokens=4)
    messages: list[dict[str, str]] = []
    expected = []
    for question in ("how many apples", "how many pens"):
        messages.append({"role": "user", "content": question})
        expected.append(plain.generate(messages, max_new_tokens=12)[0].text)
        messages.append({"role": "assistant", "content": expected[-1]})
    monkeypatch.setattr(sys, "stdin", io.StringIO("how many apples\n\nhow many pens\n"))
    with (
        SpeculativeLM.from_pretrained(model, "none", config=config, brought=16) as lm,
        served({NAME: Answers(lm, "replica", PATIENCE, edge)}, edge=edge) as address,
    ):
        assert main(["--server", address, "--tokenizer", str(model), "--max_tokens", "12"]) == 0
    shown = ("\n".join(map(printable, text.split("\n"))) for text in expected)
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in shown)


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (([], "set tokenizer"), (["--draft_model", "/nowhere"], "/nowhere")):
        assert main(["--server", "http://host:1", *arguments]) == 1
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
