"""A room that the engine has never heard of: its part is told of every event of its row, in order."""

from __future__ import annotations

import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.errors import RequestError
from drafter.parts.contract import NewTokens, Row, RowPart
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import AdversarialDrafter, SpellingTokenizer


class Diary(RowPart):
    """It needs `pieces` before its row's prompt may be read, and ends the output after `most` tokens."""

    def __init__(self, pieces: int = 0, most: int = 99) -> None:
        self.events: list[str] = []
        self._pieces, self._most = pieces, most

    def enter(self, row: Row, slot: int, tokens: int) -> bool:
        self.events.append("enter")
        self._pieces -= 1
        return self._pieces < 0

    def after_token(self, row: Row):  # type: ignore[no-untyped-def]
        self.events.append("token")
        return "stop" if len(row.output) == self._most else None

    def after_step(self, row: Row, new: NewTokens) -> None:
        assert row.output[len(row.output) - len(new.tokens) :] == new.tokens
        self.events.append("step")

    def leave(self, row: Row, slot: int | None) -> None:
        self.events.append(f"leave {slot}")

    def result(self, row: Row) -> dict[str, list[int]]:
        self.events.append("result")
        return {"drafter_versions": [7]}


def engine_with(base: BaseModel, part: RowPart, nodes: int = 0) -> Engine:
    drafter = AdversarialDrafter(0, nodes=nodes) if nodes else PlainDecoding()
    engine = Engine(base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=2, max_model_len=64))
    engine._rooms = (*engine._rooms, lambda handle: part)
    return engine


def decoded(engine: Engine, **sampling: object) -> Handle:
    handle = engine.submit(Request([5, 6, 7], SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **sampling})))  # type: ignore[arg-type]
    while not engine.idle:
        engine.step()
    return handle


def test_a_part_is_told_of_its_row_from_beginning_to_end(tiny_base: BaseModel) -> None:
    diary = Diary(pieces=2)
    found = decoded(engine_with(tiny_base, diary)).result(0)
    assert found.drafter_versions == [7]
    assert diary.events == [*["enter"] * 3, *["token", "step"] * 4, "result", "leave 0"]


@pytest.mark.parametrize("nodes", [0, 5])
def test_a_part_may_end_the_output_at_any_token(tiny_base: BaseModel, nodes: int) -> None:
    whole = decoded(engine_with(tiny_base, Diary())).result(0)
    found = decoded(engine_with(tiny_base, Diary(most=3), nodes)).result(0)
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:3], "stop")


def test_a_row_whose_part_cannot_begin_ends_with_the_reason_and_leaves_the_others(tiny_base: BaseModel) -> None:
    class Broken(Diary):
        def enter(self, row: Row, slot: int, tokens: int) -> bool:
            raise RequestError("there is nothing to begin with")

    broken = Broken()
    engine = engine_with(tiny_base, broken)
    handle = decoded(engine)
    with pytest.raises(RequestError, match="nothing to begin with"):
        handle.result(0)
    assert broken.events == ["leave 0"]
    engine._rooms = engine._rooms[:-1]
    assert len(decoded(engine).result(0).token_ids) == 4


def test_an_engine_that_fails_lets_parts_leave(tiny_base: BaseModel) -> None:
    diary = Diary()
    engine = engine_with(tiny_base, diary)
    engine.submit(Request([5, 6, 7], SamplingParams(9, ignore_eos=True)))
    engine.step()
    engine.fail(RuntimeError("broken"))
    assert diary.events[-1] == "leave None"
