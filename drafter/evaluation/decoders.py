"""Decoders to compare, such as this project's engine, and the loop that runs them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from drafter.devices import synchronise
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts

Name = TypeVar("Name")

_WARM_UP_PROMPTS = 2
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """Record of decoding some requests; only engines have results, stages and steps.

    `seconds` include prefills; `stages` are the seconds in each of `statistics.STAGES`.
    """

    seconds: float
    outputs: list[list[int]]
    generations: list[Generation] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def counts(self) -> list[DecodeCounts]:
        """Speculation counts of each request; empty if the decoder keeps none."""
        return [one.counts for one in self.generations]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


Decoder = Callable[[Sequence[Request]], Run]
"""Decodes requests to their ends."""


def decode_all(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decode requests with an engine, timed from the first submission to the last token."""
    synchronise(engine.base.device)
    before, start = engine.state(), time.perf_counter()
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    synchronise(engine.base.device)
    seconds, after = time.perf_counter() - start, engine.state()
    generations = [handle.result(0) for handle in handles]
    stages = {stage: after.stage_seconds[stage] - spent for stage, spent in before.stage_seconds.items()}
    return Run(seconds, [one.token_ids for one in generations], generations, stages, after.steps - before.steps)


def room_for(requests: Sequence[Request], slots: int, **settings: Any) -> EngineConfig:
    """Return an engine's settings with a queue for all `requests`, and the length of the longest.

    Nothing is kept of rows that have ended: in each round the prompts are the same, and are read.
    """
    longest = max(len(one.prompt_ids) + one.sampling.over().max_new_tokens for one in requests)
    return EngineConfig(slots, longest, kept_rows=0, max_queue=len(requests), **settings)


def warm_up(decode: Decoder, requests: Sequence[Request], rows: int) -> None:
    """Decode as many requests like the first of `requests` as fill `rows`."""
    decode([warm_up_request(one) for one in requests[: max(_WARM_UP_PROMPTS, rows)]])


def warm_up_request(request: Request) -> Request:
    """Return a request of the same length with the prompt reversed, so that a drafter learns nothing from it."""
    tokens = min(request.sampling.over().max_new_tokens, _WARM_UP_TOKENS)
    sampling = replace(request.sampling, max_new_tokens=tokens, min_tokens=0, ignore_eos=True)
    return replace(request, prompt=request.prompt_ids[::-1], sampling=sampling)


def differing_tokens(output: Sequence[int], expected: Sequence[int]) -> int:
    """Count tokens that differ from those expected at the same positions; missing tokens differ."""
    return max(len(output), len(expected)) - sum(a == b for a, b in zip(output, expected, strict=False))


def in_turns(
    decoders: Mapping[Name, Decoder], portions: Sequence[Sequence[Request]], rounds: int
) -> Iterator[dict[Name, list[list[Run]]]]:
    """Decode each portion of requests by all decoders, one after another, in every round.

    Another decoder begins each turn, so that a changing load of the machine affects all alike. After each turn, yields
    the runs so far, a run of each portion by round.
    """
    names = list(decoders)
    runs: dict[Name, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in names}
    for turn, (done, portion) in enumerate(product(range(rounds), portions)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name][done].append(decoders[name](portion))
        yield runs
