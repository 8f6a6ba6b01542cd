"""What a grammar of calls holds an output to is what is read of it, wherever the output ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from drafter.acceptance.choices import bits
from drafter.acceptance.guide import Guide
from drafter.calls import CallForm, Calls
from drafter.embedded import EMBEDDED_BASE
from drafter.methods.grammar.grammars import Grammars
from drafter.requests import SamplingParams
from drafter.structured_outputs import CallOutputs
from drafter.text.call_marks import CallMarks
from drafter.text.text_stream import read_output
from drafter.text.tokenizers import load_tokenizer
from pipeline.openai.tool_calls import read_message

FORMS = {
    "hermes": CallForm("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "mistral": CallForm("[TOOL_CALLS]", " [", ", ", "]"),
    "granite": CallForm("<|tool_call|>", "[", ", ", "]"),
    "llama": CallForm("<|python_tag|>", arguments="parameters", bare=True),
}
MARKS = [*("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>"), "<think>", "</think>"]
SCHEMA = '{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"],"additionalProperties":false}'
RIGHT = [json.dumps({"x": x}) for x in (1, 2)]
PIECES = [
    *("hello ", "[", " [", '{"na', 'me": "a", "arguments": {"x": ', '{"zz', "\n", "]", "}", *MARKS),
    *(f'{{"name": "a", "{word}": {RIGHT[0]}}}' for word in ("arguments", "parameters")),
]


@pytest.fixture(scope="module", params=["text", "plain", "special"])
def grammars(request: pytest.FixtureRequest) -> tuple[Any, Grammars]:
    tokenizer = load_tokenizer(str(EMBEDDED_BASE))
    if request.param != "text":
        special = request.param == "special"
        tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    return tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def tokens_under(guide: Guide, tokenizer: Any, pieces: list[list[int]], chance: random.Random) -> Iterator[int]:
    """Likely pieces as far as they are allowed, what must follow, and anything that may."""
    while True:
        kind = chance.random()
        if kind < 0.5:
            run = chance.choice(pieces)
        elif kind < 0.9:
            run = list(guide.forced())
        else:
            mask = torch.zeros((len(tokenizer) + 31) // 32, dtype=torch.int32)
            guide.fill(mask)
            run = [chance.choice(bits(mask[None], len(tokenizer))[0].nonzero()[:, 0].tolist())]
        for token in run:
            if not guide.consume(token):
                break
            yield token
            if token == tokenizer.eos_token_id:
                return


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_calls_that_are_read_are_those_that_were_held(grammars: tuple[Any, Grammars], form: CallForm) -> None:
    tokenizer, guides = grammars
    marks, found = CallMarks.of(tokenizer, form), 0
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in PIECES]
    for seed in range(30):
        chance = random.Random(seed)
        asked = CallOutputs(calls=Calls(form, (("a", SCHEMA),), otherwise="" if seed % 2 else None))
        output = []
        for token in tokens_under(guides.guide(asked, [5]), tokenizer, pieces, chance):
            output.append(token)
            if len(output) == 20 + seed:
                break
        ended = output[-1] == tokenizer.eos_token_id
        said = read_output(tokenizer, [5], output, SamplingParams(structured_outputs=asked))
        message, whole = read_message(marks, ["a"], said.marked, "a")
        arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        assert all(one in RIGHT for one in arguments[:-1])
        assert all(any(right.startswith(one) for right in RIGHT) for one in arguments)
        assert whole or not (ended and arguments)
        assert arguments or seed % 2 or not ended
        assert arguments or message["content"] == said.text
        found += bool(arguments)
    assert found > 3


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_of_calls_end_and_those_of_texts_go_on(grammars: tuple[Any, Grammars], form: CallForm) -> None:
    tokenizer, guides = grammars
    schema = '{"type":"object","properties":{"x":{"type":"number"}},"required":["x"]}'
    for otherwise in (None,) if form.bare else (None, ""):
        guide = guides.guide(CallOutputs(calls=Calls(form, (("a", schema),), otherwise=otherwise)), [5])
        said = "" if otherwise is None else "1" * 40
        call = f'{"" if form.bare else form.marker}{form.first}{form.head("a")}{{"x": 0.'
        assert all(map(guide.consume, tokenizer.encode(said + call, add_special_tokens=False)))
        [digit] = tokenizer.encode("7", add_special_tokens=False)
        count = 0
        while guide.consume(digit):
            count += 1
        assert count == 17
        guide.rewind(count)
        assert guide.consume(digit)
