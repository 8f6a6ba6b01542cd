"""A message is the same whole, streamed, and read from the row of a batch."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.requests import Generation, Request, SamplingParams, TokenDelta
from drafter.statistics import DecodeCounts
from drafter.text.text_stream import TextStream, read_output
from pipeline.openai.answers import Chunks, response
from pipeline.openai.requests import ParsedRequest, parse_chat
from pipeline.output.batch_results import _generation_of
from pipeline.output.columns import RunTraits, column_values
from tests.support.marking import DECODERS, KINDS, MARKS, WORDS, ids_of, made
from tests.support.properties import examples

TOKENIZERS = {
    (decoder, kind, template): made(decoder, kind, template)
    for decoder in DECODERS
    for kind in KINDS
    for template in ("<tool_call>", "[TOOL_CALLS] [", "")
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
TRAITS = RunTraits(SamplingParams(), rows_have_settings=True, reasons=True)
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
ASKED: list[dict[str, Any]] = [
    {},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": [" yes"]}},
]
CALL = ['{"name": "f", "arguments": ', "{", "}", "}"]
TAGGED, LISTED = ["<tool_call>", "\n", *CALL, "\n", "</tool_call>"], ["[TOOL_CALLS]", "▁[", *CALL, "]"]
PARTS = [TAGGED, LISTED, CALL, TAGGED[:2], TAGGED[-2:], LISTED[:2], ["</think>"], ["<think>"]]


def streamed(
    request: ParsedRequest, prompt: list[int], tokenizer: Any, pieces: list[list[int]], made: Generation
) -> Any:
    """The message, and the finish reason, that the events of a stream add up to."""
    chunks, stream = Chunks(request, "c", 1, str, speculation=False), TextStream(tokenizer, prompt, _sampling(request))
    events = ""
    for place, piece in enumerate(pieces):
        for token in piece:
            stream.push(token)
        new = stream.rest() if place == len(pieces) - 1 else stream.new()
        events += chunks.step(0, TokenDelta(piece, new.text, 0, None, [], new.reasoning or "", new.marked))
    message, calls, reason = defaultdict[str, str](str), list[dict[str, Any]](), None
    for line in filter(None, (events + chunks.finish(0, made)).splitlines()):
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        reason = choice["finish_reason"] or reason
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message["content"], message["reasoning_content"], calls, reason


def _sampling(request: ParsedRequest) -> SamplingParams:
    return request.sampling(SamplingParams(stop=["]]"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", TOKENIZERS, ids="-".join)
@examples(40)
@given(data=st.data())
def test_all_routes_tell_the_same(key: tuple[str, str, str], data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[key]
    stop = data.draw(st.sampled_from([None, "b", "<tool", "]"]))
    request = parse_chat(BODY | data.draw(st.sampled_from(ASKED)) | {"stop": stop}).for_model(tokenizer)
    word = st.one_of(st.sampled_from(PARTS), st.sampled_from([*WORDS, *MARKS]).map(lambda one: [one]))
    words = [one for some in data.draw(st.lists(word, max_size=8)) for one in some]
    prompt = ids_of(tokenizer, *data.draw(st.sampled_from([["a"], ["a", "<think>"]])))
    stream, ids = TextStream(tokenizer, prompt, _sampling(request)), list[int]()
    for token in ids_of(tokenizer, *words):
        ids.append(token)
        stream.push(token)
        if stream.found:
            break
    said = read_output(tokenizer, prompt, ids, _sampling(request))
    made = Generation(
        "a#0", ids, said.text, "stop", 1, DecodeCounts(), reasoning_content=said.reasoning, marked=said.marked
    )
    [whole] = response(request, [made], "c", 1, str)["choices"]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=5)) | {0, len(ids)})
    pieces = [ids[start:stop] for start, stop in pairwise(cuts)] or [[]]
    row = column_values(made, Request(prompt, _sampling(request)), TRAITS) | {"request_id": "a#0"}
    [of_row] = response(request, [_generation_of(row, request, lambda: tokenizer)], "c", 1, str)["choices"]
    assert of_row == whole
    message = whole["message"]
    told = (
        message["content"] or "",
        message.get("reasoning_content", ""),
        message.get("tool_calls", []),
        whole["finish_reason"],
    )
    assert streamed(request, prompt, tokenizer, pieces, made) == told
    if not message.get("tool_calls"):
        assert message["content"] == said.text == row["text"]
    assert message.get("reasoning_content", "") == row["reasoning_content"]
