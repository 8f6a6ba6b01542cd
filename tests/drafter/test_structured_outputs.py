"""Records in Python: what may be asked for, and what a result says of it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from drafter import RequestError, SamplingParams, SpeculativeLM, StructuredOutputs


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fruit: Literal["apples", "pens"]
    number: Annotated[int, Field(ge=0, le=999)]


@pytest.fixture(scope="module")
def lm() -> Iterator[SpeculativeLM]:
    with SpeculativeLM.from_pretrained(drafter="forced", max_num_seqs=4, num_draft_tokens=8) as loaded:
        yield loaded


def test_a_record_of_a_pydantic_model(lm: SpeculativeLM) -> None:
    prompt = "Tom has 3 apples."
    sampling = SamplingParams(structured_outputs=StructuredOutputs(json=Order), max_new_tokens=60)
    (answer,) = lm.chat(prompt, sampling)
    order = Order.model_validate_json(answer.text)
    assert (answer.valid, answer.finish_reason) == (True, "stop")
    assert json.dumps(order.model_dump(), ensure_ascii=False) == answer.text  # on one line, with a space after , and :
    assert len(answer.forced) == answer.counts.num_forced_tokens > 0
    assert answer.counts.num_accepted_draft_tokens > 0

    schema = Order.model_json_schema()
    for same in (schema, json.dumps(schema), Order):
        assert lm.chat(prompt, structured_outputs={"json": same}, max_new_tokens=60)[0].token_ids == answer.token_ids
    streamed = lm.stream([{"role": "user", "content": prompt}], sampling)
    deltas = list(streamed)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert streamed.result().valid
    parts = [delta.text[start:stop] for delta in deltas for start, stop in delta.forced]
    expected = [lm.tokenizer.decode([answer.token_ids[place]], skip_special_tokens=True) for place in answer.forced]
    assert [part for part in parts if part] == [text for text in expected if text]


class Picky(BaseModel):
    fruit: Literal["apples", "pens"]

    @field_validator("fruit")
    @classmethod
    def never(cls, value: str) -> str:
        raise ValueError("no fruit is good enough")


@dataclass
class Point:
    x: Annotated[int, Field(ge=0, le=9)]


class Pair(TypedDict):
    left: Annotated[int, Field(ge=0, le=9)]
    right: NotRequired[bool]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (Order, Order),
        (Point, Point),
        (Pair, dict),
        (Annotated[list[Point], Field(max_length=2)], list),
        (TypeAdapter(tuple[Literal["a"], bool]), tuple),
        (Literal["a", "b"], str),
        (Order.model_json_schema(), dict),
    ],
)
def test_an_answer_is_read_as_what_was_asked_for(lm: SpeculativeLM, given: Any, kind: type) -> None:
    (answer,) = lm.chat("Tom has 3 apples.", structured_outputs={"json": given}, max_new_tokens=80)
    assert answer.valid
    assert isinstance(answer.parsed, kind)
    assert answer.parsed is answer.parsed
    handle = lm.stream("Tom", structured_outputs=StructuredOutputs(json=given), max_new_tokens=1)
    assert (handle.result().valid, handle.result().parsed) == (False, None)


def test_a_record_that_its_type_refuses_is_not_valid(lm: SpeculativeLM, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        (answer,) = lm.chat("Tom has apples.", structured_outputs={"json": Picky}, max_new_tokens=60)
        assert (answer.finish_reason, answer.valid, answer.parsed) == ("stop", False, None)
    assert [one for one in caplog.messages if "no fruit is good enough" in one and "Picky" in one] == caplog.messages[
        -1:
    ]
    (by_schema,) = lm.chat("Tom has apples.", structured_outputs={"json": Picky.model_json_schema()}, max_new_tokens=60)
    assert (by_schema.valid, by_schema.token_ids) == (True, answer.token_ids)


@pytest.mark.parametrize("given", [Order, list[int], TypeAdapter(dict[str, int])])
def test_a_type_alone_says_what_a_record_is(given: Any) -> None:
    asked = SamplingParams(structured_outputs=given).structured_outputs
    assert asked is not None
    assert asked == StructuredOutputs(json=given)
    assert asked.record_type is not None


def test_what_is_asked_for_is_the_schema_alone() -> None:
    asked = StructuredOutputs(json=Order)
    assert asked == StructuredOutputs(json=Order.model_json_schema())
    assert hash(asked) == hash(StructuredOutputs(json=Order.model_json_schema()))
    away = pickle.loads(pickle.dumps(StructuredOutputs(json=Picky)))
    assert away.read('{"fruit": "pens"}') == {"fruit": "pens"}
    with pytest.raises(RequestError, match=r"structured_outputs\.json: SpeculativeLM: "):
        StructuredOutputs(json=SpeculativeLM)


def test_each_prompt_may_have_a_form_of_its_own(lm: SpeculativeLM) -> None:
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{3}"}},
        {"structured_outputs": {"grammar": 'start: "a" "b"+'}, "max_new_tokens": 4},
        {"structured_outputs": {"json": {"type": "objekt"}}},
        {},
        {"structured_outputs": {"json": Order}, "max_new_tokens": 3},
        {"structured_outputs": {"json_object": True}, "stop": ['"']},
    ]
    choice, regex, grammar, bad, free, short, stopped = lm.generate(
        ["Is it?"] * 7, [{"max_new_tokens": 30, **one} for one in asked]
    )
    assert (choice.text in ("yes", "no"), choice.valid) == (True, True)
    assert (len(regex.text), regex.valid) == (7, True)
    assert set(grammar.text) == {"a", "b"}
    assert (bad.finish_reason, bad.valid, bad.text) == ("error", None, "")
    assert "structured_outputs.json" in str(bad.error)
    assert (free.valid, free.forced) == (None, [])
    assert (short.finish_reason, short.valid) == ("length", False)
    assert (stopped.finish_reason, stopped.valid) == ("stop", False)  # in the middle of an object
    with pytest.raises(RequestError, match=r"prompt 0: structured_outputs\.json"):
        lm.generate("Is it?", structured_outputs={"json": {"type": "objekt"}}, on_error="raise")
    with pytest.raises(RequestError, match="structured_outputs: unknown setting jsn: use json"):
        lm.generate("Is it?", structured_outputs={"jsn": {}})
    handle = lm.stream("Is it?", structured_outputs={"json": Order})
    handle.cancel()
    assert handle.result().valid is (handle.result().finish_reason == "stop")
