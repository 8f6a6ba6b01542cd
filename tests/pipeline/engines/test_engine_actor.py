"""An engine's actor: a part in, and the same part with generated rows committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import ray

from drafter import EngineConfig, SamplingParams, SpeculativeLM
from drafter.acceptance.contract import ExactVerifier
from drafter.errors import LoadError
from pipeline.engines.engine_actor import EngineActor
from pipeline.engines.ledger import Ledger
from pipeline.engines.models import EngineSpec
from pipeline.engines.shared_texts import OtherTexts
from pipeline.io.files import locate
from pipeline.output.columns import RunTraits, columns_type, wanted_columns
from pipeline.progress.board import Kind, StatusBoard
from pipeline.settings import LimitsConfig
from tests.pipeline.conftest import untimed
from tests.support.parts import request_part
from tests.support.waiting import wait_until

TRAITS = RunTraits(SamplingParams(), rows_have_settings=False)

_NO_OTHERS = OtherTexts(None, shared=False)


COMMITTED: dict[str, pa.Table] = {}
"""What the actors' objects have committed, by part."""


def rows_of(block: pa.Table) -> pa.Table:
    """The committed rows of the only part in a block."""
    (part,) = block["part"].to_pylist()
    return COMMITTED[part]


def generated(block: pa.Table) -> list[dict[str, Any] | None]:
    return [row and untimed(row) for row in rows_of(block)["generated"].to_pylist()]


MakeActor = Callable[..., EngineActor]


@pytest.fixture(scope="module")
def make_actor(local_ray: None, model: Path) -> Iterator[MakeActor]:
    """Make an actor's object, in this process: `make_actor("ngram", base="another")`."""
    made = []

    def make(
        drafter: str,
        base: str | None = None,
        loads: type[EngineSpec] = EngineSpec,
        others: OtherTexts = _NO_OTHERS,
    ) -> EngineActor:
        spec = loads(str(model), drafter, {}, EngineConfig(max_num_seqs=2, num_draft_tokens=3), threads=1)
        board = ray.remote(num_cpus=0)(StatusBoard).remote()
        ledger = ray.remote(num_cpus=0)(Ledger).remote((), base)
        actor = EngineActor(spec, LimitsConfig(), TRAITS, ledger, board, "test", COMMITTED.__setitem__, others)
        made.append(actor)
        return actor

    yield make
    # An actor's process ends with it; here its beat would go on, and have Ray start once more.
    for actor in made:
        if actor.failure is None:
            actor._pulse.end()


@pytest.fixture(scope="module")
def actor(make_actor: MakeActor) -> EngineActor:
    """An actor's object with a drafter."""
    return make_actor("ngram")


def test_a_call_returns_its_rows_in_their_order_and_the_same_again(actor: EngineActor) -> None:
    prompts: list[list[int] | None] = [[7, 8, 9] * (1 + n % 3) for n in range(7)]
    first, second = actor(request_part(prompts)), actor(request_part(prompts, "q"))
    assert generated(first) == generated(second)
    rows = rows_of(first)
    assert rows.drop_columns(["generated"]).equals(rows_of(second).drop_columns(["generated"]))
    assert rows["request_id"].to_pylist() == [str(n) for n in range(7)]
    assert rows.schema.field("generated").type == columns_type(wanted_columns(TRAITS))
    assert rows.column_names == ["request_id", "row", "problem", "generated"]


def test_a_part_that_is_committed_is_not_generated_again(actor: EngineActor) -> None:
    """An engine may end before Ray has heard that its part is done, and its successor is given the part again."""
    part = request_part([[7, 8, 9]], "once")
    assert generated(actor(part)) != [None]
    del COMMITTED["once"]
    assert actor(part)["part"].to_pylist() == ["once"]
    assert "once" not in COMMITTED


def test_parts_share_the_engine_across_their_borders(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one row each decode together; one after the other, no two rows would ever be active."""
    engine, active = actor._lm.engine, set()
    step = engine.step

    def watched() -> None:
        step()
        active.add(len(engine.scheduler.active))

    monkeypatch.setattr(engine, "step", watched)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(actor, request_part([[7, 8, 9]], f"border{n}", tokens=200)) for n in range(2)]
        results = [call.result() for call in calls]
    assert 2 in active
    assert [result["part"].to_pylist() for result in results] == [["border0"], ["border1"]]
    assert generated(results[0]) == generated(results[1])


def test_rows_that_the_engine_refuses_do_not_harm_others(actor: EngineActor) -> None:
    result = actor(request_part([[7, 8], [], [10_000], [7] * 300, [7, 8]], "refused"))
    kinds = [problem and problem["type"] for problem in rows_of(result)["problem"].to_pylist()]
    assert kinds == [None, "Refused", "Refused", "Refused", None]
    rows = generated(result)
    assert [row is None for row in rows] == [False, True, True, True, False]
    assert rows[0] == rows[4]


class CountingBoard(StatusBoard):
    """A board that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    def beat(self, *report: Any) -> None:
        self._calls["beat"] += 1
        super().beat(*report)

    def put(self, kind: Kind, report: Any, sender: str | None = None) -> None:
        self._calls[kind] += 1
        super().put(kind, report, sender)

    def calls(self) -> Counter[str]:
        return self._calls


def test_parts_that_are_open_together_make_no_calls_of_their_own(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished part makes the engine's report due, which has the news of all parts; no beat falls into this."""
    board = ray.remote(num_cpus=0)(CountingBoard).remote()
    monkeypatch.setattr(actor, "_progress", board)
    monkeypatch.setattr(actor._pulse, "_work", lambda: None)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: actor(request_part([[7, 8, 9]] * 2, f"counted{n}", tokens=20)), range(3)))
    calls = ray.get(board.calls.remote())
    assert calls == {"beat": 3, "engine": 3, "part": 3}
    mail = ray.get(board.mail.remote("", 0))
    assert {name: mail.reports["part", name].rows for name in ("counted0", "counted1", "counted2")} == {
        "counted0": 2,
        "counted1": 2,
        "counted2": 2,
    }


class LossyVerifier(ExactVerifier):
    """A verifier that is not lossless, by its own account."""

    lossless = False


class LossyEngine(EngineSpec):
    """An engine with such a verifier."""

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        lm = super().load(on_stage)
        lm.engine.verifier = LossyVerifier()
        return lm


def test_its_drafter_remembers_the_rows_of_the_output(
    make_actor: MakeActor, actor: EngineActor, tmp_path: Path
) -> None:
    earlier = [list(range(100, 200)), list(range(200, 300))]
    table = pa.table({"prompt_token_ids": earlier, "token_ids": earlier[::-1]})
    pa.parquet.write_table(table, tmp_path / "part.parquet")
    remembers = make_actor("memory+ngram", others=OtherTexts(locate(str(tmp_path)), shared=False))
    made, numbers = generated(actor(request_part([[7, 8, 9]], "made"))), count()

    def entered() -> bool:
        """What was read is entered before a step."""
        (again,) = generated(remembers(request_part([[7, 8, 9]], f"again {next(numbers)}")))
        assert again is not None
        assert made[0] is not None
        assert again["token_ids"] == made[0]["token_ids"]
        return remembers._lm.engine.state().memory_tokens >= 400

    wait_until(entered, "the rows")


def test_rows_of_a_verifier_that_is_not_lossless_are_marked(actor: EngineActor, make_actor: MakeActor) -> None:
    assert "lossless" not in rows_of(actor(request_part([[7, 8]], "exact")))["generated"].to_pylist()[0]
    lossy = make_actor("none", loads=LossyEngine)
    assert [row and row["lossless"] for row in generated(lossy(request_part([[7, 8], []], "lossy")))] == [False, None]
    assert lossy._facts.lossless is False


def test_an_engine_that_fails_ends_its_process(make_actor: MakeActor, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = make_actor("none")

    def died() -> None:
        raise SystemExit("died")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr("pipeline.engines.engine_actor._die", died)
    monkeypatch.setattr(actor._lm.base, "verify", broken)
    with pytest.raises(SystemExit, match="died"):
        actor(request_part([[7, 8]]))


def test_an_engine_with_other_weights_than_the_first_is_refused(make_actor: MakeActor) -> None:
    actor = make_actor("none", base="another")
    with pytest.raises(LoadError, match=r"weights \(.*\) are not those of the output's other rows \(another\)"):
        actor(request_part([[7, 8]]))
