"""Nothing of a client who did not agree comes to a learner: neither tokens nor hidden states leave the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from torch import Tensor

from drafter import EngineConfig, SpeculativeLM
from drafter.methods.learning.drafter import Learning
from drafter.methods.learning.settings import StartingHead
from drafter.parts.learning import EndedRow
from pipeline.serving.keys import Agreement, Keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

AGREED, OTHER = "sk-agreed", "sk-other"


class Watched:
    """A tap that takes everything, and keeps what it was told of."""

    def __init__(self) -> None:
        self.rows: list[EndedRow] = []
        self.hidden: list[Tensor | None] = []

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        self.rows.append(row)
        return True

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: Any) -> None:
        self.hidden.append(hidden)


@dataclass(frozen=True)
class Watching(Learning):
    watched: Watched

    def tap(self) -> Watched:  # type: ignore[override]
        return self.watched


@pytest.fixture(scope="module")
def learning(model: Path) -> Iterator[tuple[SpeculativeLM, Watched, str]]:
    """An engine whose rows are watched, and the address of an endpoint with it."""
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in (AGREED, OTHER))
    config, tap = EngineConfig(max_num_seqs=4), Watched()
    with SpeculativeLM.from_pretrained(model, "auto", config=config, learning=Watching(StartingHead(), tap)) as lm:
        answers = {NAME: Answers(lm, "replica", seconds=PATIENCE)}
        with served(answers, Keys(digests), agreement=Agreement(digests=digests[:1])) as address:
            yield lm, tap, address


def ask(address: str, key: str, question: str, *, stream: bool) -> None:
    """A chat of two choices and a completion."""
    client = OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
    messages: Any = [{"role": "user", "content": question}]
    chat: Any = client.chat.completions.create(model=NAME, messages=messages, n=2, max_tokens=6, stream=stream)
    text: Any = client.completions.create(model=NAME, prompt=question, max_tokens=6, stream=stream)
    if stream:
        list(chat)
        list(text)


@pytest.mark.parametrize("stream", [True, False])
def test_only_rows_of_who_agreed_are_handed_out(learning: tuple[SpeculativeLM, Watched, str], stream: bool) -> None:
    lm, tap, address = learning
    tap.rows.clear()
    tap.hidden.clear()
    ask(address, OTHER, "how many apples", stream=stream)
    assert not tap.rows
    assert not tap.hidden

    ask(address, AGREED, "how many pens", stream=stream)
    ask(address, OTHER, "how many apples", stream=stream)
    prompts = [lm.tokenizer.decode(list(row.prompt)) for row in tap.rows]
    assert len(prompts) == len(tap.hidden) == 3
    assert all("pens" in prompt and "apples" not in prompt for prompt in prompts)
    assert [None if one is None else len(one) for one in tap.hidden] == [row.length for row in tap.rows]
