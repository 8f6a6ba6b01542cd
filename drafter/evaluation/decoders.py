"""Decoders to compare, this project's engine and transformers' `generate`, and the loop that runs them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import torch

from drafter.devices import synchronise
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Generation, Request, sampling_defaults
from drafter.statistics import DecodeCounts
from drafter.target_model.prepacked import as_loaded

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


def padding(tokenizer: Any) -> int:
    """Return a padding token. Any token will do, because padding is masked."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def transformers_decoder(model: Any, ends: Collection[int], batch: int, pad: int, **settings: Any) -> Decoder:
    """Return a decoder that calls a model's `generate` as its users do, in batches padded on the left.

    `ends` are the tokens that end a text, `settings` further ones of `generate`. The requests must share their sampling
    settings except the seed. Above temperature 0 `generate` draws with its own random generator.
    """

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        prompts, sampling = [list(request.prompt_ids) for request in requests], requests[0].sampling
        sampling = sampling.over(sampling_defaults(model.generation_config.to_dict(), "of `generate`"))
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        drawn = {"do_sample": True} | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        torch.manual_seed(sampling.seed)
        with as_loaded(model):
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad,
                **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                **settings,
            )
        return [_until_end(row, ends) for row in made[:, width:].tolist()]

    def decode(requests: Sequence[Request]) -> Run:
        synchronise(model.device)
        start = time.perf_counter()
        outputs = [o for first in range(0, len(requests), batch) for o in generate(requests[first : first + batch])]
        synchronise(model.device)
        return Run(time.perf_counter() - start, outputs)

    return decode


def _until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return `tokens` up to the first end token, inclusive."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


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
