"""`drafter edge`: a chat in a terminal whose answers this device drafts and a server verifies. It needs no Ray."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from drafter.errors import EngineError, LoadError, RequestError, printable
from pipeline.command_line import at_least, make_parser, parse
from pipeline.errors import InputError, JobError

KEY = "DRAFTER_API_KEY"
"""Environment variable with the server's key: a command line is seen by all users of a machine."""
_GREY, _PLAIN = "\x1b[90m", "\x1b[0m"
_DESCRIPTION = f"""\
Chat with a model on a server that runs `drafter serve --edge.sessions N`. This device drafts the answers, and what
the server has not confirmed yet is grey. A key comes from the environment variable {KEY}. Ctrl-D ends.

  drafter edge --server http://HOST:8000 --draft_model HuggingFaceTB/SmolLM2-135M-Instruct
  drafter edge --server http://HOST:8000 --tokenizer FOLDER"""


@dataclass(frozen=True)
class EdgeChatConfig:
    """A chat.

    Args:
        server: Address of the server, such as http://HOST:8000.
        draft_model: Folder or hub id of a small model with the server's tokeniser; by default n-grams draft.
        tokenizer: Folder or hub id of the server's tokeniser; by default the draft model's.
        temperature: Of the answers; 0 is greedy.
        seed: Of the answers.
        max_tokens: Longest answer.
        confidence: Drafts are as long as they are at least so probable.
        alone: Go on with this device's own tokens, in grey, while the server does not answer.
    """

    server: str
    draft_model: str | None = None
    tokenizer: str | None = None
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    confidence: float = 0.2
    alone: bool = False

    def __post_init__(self) -> None:
        if not self.server.startswith(("http://", "https://")):
            raise InputError(f"server must begin with http:// or https://, not be {self.server!r}")
        if self.draft_model is None and self.tokenizer is None:
            raise InputError("set draft_model, or tokenizer to the folder or hub id of the server's tokeniser")
        at_least("temperature", self.temperature, 0)
        at_least("max_tokens", self.max_tokens, 1)


def parse_config(arguments: Sequence[str] | None = None) -> EdgeChatConfig:
    parser = make_parser(EdgeChatConfig, "edge", "--server URL", _DESCRIPTION)
    return parse(EdgeChatConfig, parser, arguments)


class Screen:
    """Writes a growing text, and in grey what may follow: of that, as much as the line has room for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._grey = stream, stream.isatty()
        self._column = self._behind = 0  # of the text's end, and characters in grey behind it

    def show(self, text: str, expected: str) -> None:
        """Add to the text, and replace what is grey."""
        text = "\n".join(map(printable, text.split("\n")))
        if self._behind:
            self._stream.write(f"\x1b[{self._behind}D\x1b[K")
            self._behind = 0
        self._stream.write(text)
        columns = shutil.get_terminal_size().columns
        line = text.rpartition("\n")[2]
        self._column = (len(line) + (0 if "\n" in text else self._column)) % columns
        if self._grey:
            grey = printable(expected.partition("\n")[0])[: columns - self._column - 1]
            self._behind = len(grey)
            self._stream.write(f"{_GREY}{grey}{_PLAIN}" if grey else "")
        self._stream.flush()


def chat(config: EdgeChatConfig) -> None:
    """Read questions and write answers, until the input ends.

    Raises `InputError` if the draft model or the tokeniser cannot be loaded, and `JobError` if the server refuses, or
    cannot be reached.
    """
    from drafter.edge.client import EdgeLM  # torch takes seconds to import: check the rest first

    try:
        lm = EdgeLM(
            config.server,
            config.draft_model,
            tokenizer=config.tokenizer,
            key=os.environ.get(KEY),
            confidence=config.confidence,
            alone=config.alone,
        )
    except LoadError as error:
        raise InputError(str(error)) from error
    messages: list[dict[str, str]] = []
    sampling = {"temperature": config.temperature, "seed": config.seed, "max_new_tokens": config.max_tokens}
    while (question := _asked()) is not None:
        messages.append({"role": "user", "content": question})
        stream, screen = lm.stream(messages, sampling), Screen(sys.stdout)
        try:
            thinks = False
            for delta in stream:
                gap = "\n\n" if thinks and delta.text else ""
                thinks = (thinks or bool(delta.reasoning_content)) and not delta.text
                screen.show(delta.reasoning_content + gap + delta.text, delta.unconfirmed_text)
            messages.append({"role": "assistant", "content": stream.result().text})
        except (EngineError, RequestError) as error:
            raise JobError(str(error)) from error
        screen.show("\n", "")


def _asked() -> str | None:
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if question.strip():
            return question
