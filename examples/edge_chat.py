"""A chat in a terminal whose answers this device drafts and a server verifies: what is not confirmed yet is grey.

    python -m examples.edge_chat --server http://HOST:8000 --draft_model SMALL_MODEL

The server runs `drafter serve --edge.sessions N`. Its key comes from the environment variable DRAFTER_API_KEY, as a
command line is seen by all users of a machine. Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from drafter.edge.client import EdgeLM
from drafter.errors import EngineError, LoadError, RequestError, printable

_GREY, _PLAIN = "\x1b[90m", "\x1b[0m"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Read questions and write answers, until the input ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.edge_chat", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--server", required=True, help="address of the server, such as http://HOST:8000")
    parser.add_argument("--draft_model", help="small model with the server's tokeniser; by default n-grams draft")
    parser.add_argument("--tokenizer", help="the server's tokeniser; by default the draft model's")
    parser.add_argument("--max_tokens", type=int, default=512, help="longest answer")
    args = parser.parse_args(arguments)
    try:
        lm = EdgeLM(args.server, args.draft_model, tokenizer=args.tokenizer, key=os.environ.get("DRAFTER_API_KEY"))
        _chat(lm, args.max_tokens)
    except (EngineError, LoadError, RequestError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _chat(lm: EdgeLM, max_tokens: int) -> None:
    messages: list[dict[str, str]] = []
    while (question := _asked()) is not None:
        messages.append({"role": "user", "content": question})
        stream, screen = lm.stream(messages, max_new_tokens=max_tokens), Screen(sys.stdout)
        thinks = False
        for delta in stream:
            gap = "\n\n" if thinks and delta.text else ""
            thinks = (thinks or bool(delta.reasoning_content)) and not delta.text
            screen.show(delta.reasoning_content + gap + delta.text, delta.unconfirmed_text)
        messages.append({"role": "assistant", "content": stream.result().text})
        screen.show("\n", "")


def _asked() -> str | None:
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if question.strip():
            return question


if __name__ == "__main__":
    sys.exit(main())
