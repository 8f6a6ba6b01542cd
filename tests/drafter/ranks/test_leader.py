"""Another rank does all that an engine does with the model of rank 0, here one after the other in one process."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.engine.engine_thread import EngineThread
from drafter.errors import EngineError
from drafter.ranks.follower import Follower
from drafter.ranks.leader import Leader, refuse_split_eyes
from drafter.ranks.messages import FIRST_CACHE, Witness
from drafter.ranks.processes import Ranks
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import TargetCache
from drafter.target_model.model import BaseModel
from tests.drafter.test_identity import MAKE
from tests.support.identity import SITUATIONS, MakeDrafter, config_of, longest_of, requests_of, target_of
from tests.support.marks import pairwise
from tests.support.models import base_of, engine_of, finish, plainly, random_prompts, texts_of, tokens_of
from tests.support.waiting import PATIENCE

DRAFTERS: dict[str, MakeDrafter] = {**MAKE, "exit": lambda base, texts: FirstLayersDrafter(base, 2, 8)}


@pytest.fixture(autouse=True)
def _witnesses_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models are shared with other tests, so that none stays at their heads."""
    made = []

    class Listed(Witness):
        def __init__(self, head: nn.Module) -> None:
            super().__init__(head)
            made.append(self)

    for module in ("leader", "follower"):
        monkeypatch.setattr(f"drafter.ranks.{module}.Witness", Listed)
    yield
    for witness in made:
        witness.hook.remove()


class Recorded:
    """In place of other processes: what these would get."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, content: bytes) -> None:
        self.sent.append(content)

    def failure(self, error: BaseException) -> EngineError:
        return EngineError(f"as {error}")

    def replayed(self, base: BaseModel) -> Follower:
        follower, left = Follower(base, 1), iter(self.sent)
        with pytest.raises(StopIteration):
            follower.follow(left.__next__)
        return follower


def led(base: BaseModel) -> tuple[BaseModel, Recorded]:
    """A model as an engine gets it on rank 0. The same one will be the other rank's, whose caches are its own."""
    recorded = Recorded()
    base.allow_packing()  # which changes the model once
    return Leader(cast(Ranks, recorded), base).base, recorded


def contents(cache: TargetCache) -> Iterator[Tensor]:
    """All that a cache has in memory."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list):
            for one in value.values() if isinstance(value, dict) else value:
                yield from tensors(one)

    yield cache.blocks.table
    for layer in cache.layers:
        yield from tensors([value for name, value in vars(layer).items() if name in ("buffers", "at")])


@pytest.mark.parametrize(
    ("family", "drafter", "situation"),
    pairwise(7, ["llama", "gemma2", "qwen3_5_text", "llava", "mamba"], [*DRAFTERS], [*SITUATIONS]),
)
def test_what_a_rank_keeps_is_what_rank_0_keeps(family: str, drafter: str, situation: str) -> None:
    if drafter == "exit" and family in ("qwen3_5_text", "mamba"):
        pytest.skip("recurrent layers do not exit")
    whole, requests = target_of(family), requests_of(family)
    base, recorded = led(whole)
    expected = plainly(whole, requests, max_model_len=longest_of(family))
    made = DRAFTERS[drafter](base, texts_of(requests, expected))
    engine = engine_of(base, made, **config_of(family, made, situation, 3))
    assert tokens_of(SITUATIONS[situation](engine, requests)) == tokens_of(expected)
    assert base.lm_head_weight is whole.lm_head_weight  # with this call those of blocks go, which wait for another
    follower = recorded.replayed(whole)
    own = engine.batch.cache.own  # type: ignore[attr-defined]
    pairs = [*zip(contents(own), contents(follower._objects[FIRST_CACHE]), strict=True)]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert sum(int(one.count_nonzero()) for one, _ in pairs) > 1000


def test_rows_that_are_cancelled_leave_each_rank(tiny_base: BaseModel) -> None:
    base, recorded = led(tiny_base)
    engine = engine_of(base, PlainDecoding(), max_num_seqs=3, max_model_len=96, kept_rows=0)
    prompts = random_prompts(6, seed=2)
    handles = [engine.submit(Request(one, SamplingParams(20, ignore_eos=True))) for one in prompts]
    for step in range(3):
        engine.step()
        handles[step * 2].cancel()
    finish(engine)
    own = engine.batch.cache.own  # type: ignore[attr-defined]
    other = recorded.replayed(tiny_base)._objects[FIRST_CACHE]
    assert all(torch.equal(one, another) for one, another in zip(contents(own), contents(other), strict=True))


def test_a_rank_with_other_numbers_ends_the_engine(tiny_base: BaseModel) -> None:
    base, recorded = led(tiny_base)
    engine = engine_of(base, PlainDecoding(), max_num_seqs=2, max_model_len=64)
    finish(engine, [engine.submit(Request([3, 4, 5], SamplingParams(5, ignore_eos=True)))])
    recorded.replayed(tiny_base)
    with pytest.raises(EngineError, match="rank 1 has computed other numbers than rank 0"):
        Follower(base_of("llama", seed=1), 1).follow(iter(recorded.sent).__next__)


def test_memory_that_runs_out_inside_of_a_shared_call_ends_the_engine(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in the middle of it, so nobody can preempt rows and go on."""
    base, _ = led(tiny_base)
    engine = engine_of(base, PlainDecoding(), max_num_seqs=2, max_model_len=64)
    handles = [engine.submit(Request([3, 4], SamplingParams(5))) for _ in range(2)]

    def without_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(tiny_base, "verify", without_memory)
    with pytest.raises(EngineError, match="as no memory"):
        finish(engine, handles)


def test_a_vision_tower_that_is_split_looks_at_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for the others, which do not look at images."""
    whole = target_of("llava")
    base = SimpleNamespace(name="m", model=whole.model, decoder=whole.decoder, sight=whole.sight, blind="")
    refuse_split_eyes(cast(BaseModel, base))
    assert base.sight is whole.sight
    monkeypatch.setattr("drafter.ranks.leader.DTensor", torch.nn.Parameter)  # each is one of several parts, then
    refuse_split_eyes(cast(BaseModel, base))
    assert base.sight is None
    assert base.blind.startswith("m reads no images here: its model.vision_tower.")


def test_a_step_that_never_ends_does_not_keep_its_requests(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs a rank waits for one that has ended."""
    monkeypatch.setattr("drafter.engine.engine_thread._PATIENCE", 0.01)
    engine, began, goes_on = engine_of(tiny_base, PlainDecoding(), max_num_seqs=1), Event(), Event()

    def step() -> None:
        began.set()
        goes_on.wait(PATIENCE)

    monkeypatch.setattr(engine, "step", step)
    thread = EngineThread(engine)
    handle = engine.submit(Request([3], SamplingParams(5)))
    thread.wake()
    assert began.wait(PATIENCE)
    thread.fail(EngineError("a rank has ended"))
    with pytest.raises(EngineError, match="a rank has ended"):
        handle.result(0)
    thread.close()  # which does not wait for the step
    goes_on.set()
    thread._thread.join(PATIENCE)
