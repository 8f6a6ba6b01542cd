"""Whole engine steps, of random weights in a real model's shape, with rows that come and go: rate, and busy share."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.costs import of_shape
from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from benchmarks.gpu.profile import profiled
from drafter.acceptance.guide import Guide, Guides, PutOff
from drafter.budget.contract import FixedBudget
from drafter.devices import synchronise
from drafter.drafters.contract import Ask
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs

_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {},
    "drafts, one guided row": {"structured_outputs": StructuredOutputs(regex=".*")},
    "drafts, log-probabilities": {"logprobs": 5},
    "drafts, top-k and top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "plain, blocks": {},
    "drafts, blocks": {},
    "prompts of 256": {},
    "prompts of 2,048": {},
}
"""Settings by way; one row in so many as decoded together has those of a guide, all have others."""
_NODES, _STEPS = 7, 8  # draft tokens, and steps that are profiled


class _Even(Guide):
    """Lets even tokens follow: what llguidance takes is not measured."""

    ended = False

    def consume(self, token: int) -> bool:
        return token % 2 == 0

    def rewind(self, count: int) -> None: ...

    def forced(self) -> Sequence[int]:
        return ()

    def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
        mask.fill_(0x55555555)


class _Evens(Guides):
    def guide(self, asked: StructuredOutputs, prompt: Sequence[int], salt: str = "") -> Guide:
        return _Even()


class _Given(FixedBudget):
    """Asks for what a cell needs."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ask = Ask(0)

    def plan(self, rows: int) -> Ask:
        return self.ask


class _Numbers:
    """A tokeniser of any vocabulary."""

    chat_template = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def cells(plan: Plan) -> list[Key]:
    """All ways at 16 rows, then at others."""
    shape, batches = ("tiny", [2]) if plan.tiny else ("llama-8b", [16, 64, 1])
    return [{"shape": shape, "rows": rows, "way": way} for rows in batches for way in _WAYS]


def prepare(plan: Plan) -> Measure:
    """See `Stage`. Engines of as many rows share one, but for blocks."""
    shape, longest = ("tiny", 96) if plan.tiny else ("llama-8b", 2304)
    base, drafter = of_shape(shape, "auto")
    budget, held = _Given(), dict[tuple[int, bool], Engine]()

    def engine_for(rows: int, blocks: bool) -> Engine:
        if (rows, blocks) not in held:
            held.clear()
            gc.collect()
            of_half = (rows // 2 + 1) * (longest + 128) * sum(base.kv_bytes_per_token) / 2**30
            room = of_half if blocks else None
            config = EngineConfig(rows, longest, kv_gib=room, kept_rows=0, max_queue=4 * rows)
            held[rows, blocks] = Engine(base, drafter, _Numbers(), config, budget=budget, guides=_Evens())
        return held[rows, blocks]

    def requests_of(rows: int, way: str) -> list[Request]:
        drawn, of_prompts = random.Random(0), way.startswith("prompts")
        found = []
        for row in range(2 * rows):
            length = drawn.randrange(8, 33) if plan.tiny else drawn.randrange(64, 513)
            if of_prompts and not plan.tiny:
                length = int(way.split()[-1].replace(",", ""))
            given = {} if "guided" in way and row % rows else _WAYS[way]
            tokens = 1 if of_prompts else drawn.randrange(8, 25) if plan.tiny else drawn.randrange(32, 129)
            how = SamplingParams(tokens, seed=row, ignore_eos="structured_outputs" not in given, **given)
            prompt = [drawn.randrange(3, base.vocab_size) for _ in range(length)]
            found.append(Request(prompt, how))
        return found

    def measure(cell: Key) -> Values:
        rows, way = cell["rows"], cell["way"]
        engine, requests = engine_for(rows, "blocks" in way), requests_of(rows, way)
        budget.ask = Ask(_NODES if way.startswith("drafts") else 0, fixed=True)
        decoded(engine, requests)  # until graphs are recorded
        tokens, steps, seconds = decoded(engine, requests)
        if way.startswith("prompts"):
            tokens = sum(len(one.prompt_ids) for one in requests)
            return {"tokens": tokens, "seconds": seconds, "steps": steps, "busy": None}
        handles = [engine.submit(one) for one in requests]
        for _ in range(4):
            engine.step()
        seen = profiled(engine, _STEPS)
        for handle in handles:
            handle.cancel()
        while not engine.idle:
            engine.step()
        return {"tokens": tokens, "seconds": seconds, "steps": steps, "busy": seen["busy"] / seen["seconds"]}

    return measure


def decoded(engine: Engine, requests: Sequence[Request]) -> tuple[int, int, float]:
    """Decode requests; return tokens of output, steps, and seconds."""
    before, start = engine.state(), time.perf_counter()
    handles = [engine.submit(one) for one in requests]
    while not engine.idle:
        engine.step()
    synchronise(engine.base.device)
    seconds = time.perf_counter() - start
    return sum(len(one.result().token_ids) for one in handles), engine.state().steps - before.steps, seconds


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {
        **cell,
        "tokens/s": f"{values['tokens'] / values['seconds']:.0f}",
        "ms a step": f"{1e3 * values['seconds'] / max(values['steps'], 1):.2f}",
        "busy": "-" if values["busy"] is None else f"{values['busy']:.0%}",
    }


STAGE = Stage("steps", "Engines with twice as many requests as rows, of random weights.", cells, prepare, row)
