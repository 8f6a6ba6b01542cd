"""Decoders to compare: this project's engine with any drafter, and transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from drafter.devices import synchronise
from drafter.engine.engine import Engine
from drafter.requests import Generation, Request, sampling_defaults
from drafter.statistics import DecodeCounts
from drafter.target.prepacked import as_loaded

Name = TypeVar("Name")


@dataclass(frozen=True)
class Run:
    """New tokens of some requests; `seconds` include prefills, and only engines have full results."""

    seconds: float
    outputs: list[list[int]]
    generations: list[Generation] = field(default_factory=list)

    @property
    def counts(self) -> list[DecodeCounts]:
        """Speculation counts of each request; empty if the decoder keeps none."""
        return [one.counts for one in self.generations]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


Decoder = Callable[[Sequence[Request]], Run]
"""Decodes requests to their ends."""


class Generating(Protocol):
    """A model that `generate` can run: a `BaseModel` or another one. `model` has `generate`."""

    @property
    def model(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


def decode_all(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Generation]]:
    """Decode requests; return the seconds from the first submission to the last token, and the results."""
    synchronise(engine.base.device)
    start = time.perf_counter()
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    synchronise(engine.base.device)
    return time.perf_counter() - start, [handle.result(0) for handle in handles]


def engine_decoder(engine: Engine) -> Decoder:
    """Return a decoder that uses this project's engine."""

    def decode(requests: Sequence[Request]) -> Run:
        seconds, generations = decode_all(engine, requests)
        return Run(seconds, [one.token_ids for one in generations], generations)

    return decode


def padding(tokenizer: Any) -> int:
    """Return a padding token. Any token will do, because padding is masked."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def transformers_decoder(base: Generating, batch: int, pad: int, **settings: Any) -> Decoder:
    """Return a decoder that calls `generate` as its users do, in batches padded on the left, with further `settings`.

    The requests must share their sampling settings except the seed. Above temperature 0 `generate` draws with its own
    random generator.
    """

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        prompts, sampling = [list(request.prompt_ids) for request in requests], requests[0].sampling
        sampling = sampling.over(sampling_defaults(base.model.generation_config.to_dict(), "of `generate`"))
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=base.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=base.device)
        drawn = {"do_sample": True} | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        torch.manual_seed(sampling.seed)
        with as_loaded(base.model):
            made = base.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad,
                **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                **settings,
            )
        return [_until_end(row, base.eos_token_ids) for row in made[:, width:].tolist()]

    def decode(requests: Sequence[Request]) -> Run:
        synchronise(base.device)
        start = time.perf_counter()
        outputs = [o for first in range(0, len(requests), batch) for o in generate(requests[first : first + batch])]
        synchronise(base.device)
        return Run(time.perf_counter() - start, outputs)

    return decode


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return `tokens` up to the first end token, inclusive."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def in_turns(
    decoders: Mapping[Name, Decoder], portions: Sequence[Sequence[Request]], rounds: int
) -> Iterator[dict[Name, list[list[Run]]]]:
    """Decode each portion of requests by all decoders, one after another, in every round.

    Another decoder begins each turn, so that a changing load of the machine affects all alike. After each turn, yields
    the runs so far, a run of each portion by round.
    """
    names = list(decoders)
    runs: dict[Name, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in names}
    for turn in range(rounds * len(portions)):
        done, portion = divmod(turn, len(portions))
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name][done].append(decoders[name](portions[portion]))
        yield runs
