"""What a stack's plan needs, measured on a sample of prompts; and what the stacks that it names then really take."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import torch

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Drafter
from drafter.drafters.draft_models.model_drafter import ModelDrafter
from drafter.drafters.draft_models.named import load_draft_model
from drafter.drafters.draft_models.stacked import LOWER_NODES, StackedDrafter
from drafter.drafters.names import kind_and_rest, leaf_names
from drafter.drafters.none import PlainDecoding
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.prepared_prompts import Prompt
from drafter.evaluation.stacks.stack_plan import Expectation, Levels, acceptance_of, compare_stacks
from drafter.requests import Request

_PIECES = 4
"""Pieces of an answer that a draft model continues, each from the base's own words before it."""


@dataclass(frozen=True)
class Measured:
    """What a stack took.

    Args:
        levels: Names of its drafters, from the lowest on; none is plain decoding.
        tokens: Tokens a row of a step.
        per_token: Seconds for each token, without the base's prefills.
    """

    levels: tuple[str, ...]
    tokens: float
    per_token: float


@dataclass(frozen=True)
class Comparison:
    """A plan beside the truth.

    Args:
        measured: What the plan rests on.
        expected: The stacks that may be best, the best first.
        taken: What the first of them, and plain decoding, took.
    """

    measured: Levels
    expected: list[Expectation]
    taken: list[Measured]


@dataclass(frozen=True)
class _Run:
    """Decoding of some requests.

    Args:
        drafting: Seconds of drafting, a step.
        rest: Seconds of the rest of a step; prefills are no part of it.
        rows: Rows of a step, on average.
        accepted: Accepted draft tokens of each step of each request.
        tokens: New tokens.
    """

    drafting: float
    rest: float
    rows: float
    accepted: list[list[int]]
    tokens: int

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.drafting + self.rest


class StackPlanning:
    """Measures drafters, plans the best stack of them, and measures it.

    Args:
        base: The base model.
        tokenizer: The base's tokeniser.
        names: Drafters that need no training, and `model:…`.
        nodes: Draft nodes that the base verifies.
        slots: Requests decoded together.

    Raises:
        LoadError: A drafter is of another kind, or cannot be loaded.
    """

    def __init__(self, base: BaseModel, tokenizer: Any, names: Sequence[str], nodes: int, slots: int) -> None:
        self._base, self._tokenizer, self._nodes, self._slots = base, tokenizer, nodes, slots
        for name in names:
            if kind_and_rest(name)[0] != "model" and not set(leaf_names(name)) <= TRAINING_FREE.keys() - {"none"}:
                raise LoadError(
                    f"drafter {name!r} cannot be planned with: use model:PATH_OR_HUB_ID, "
                    f"{', '.join(sorted(TRAINING_FREE.keys() - {'none'}))}, or several of these joined by '+'"
                )
        self._models = {name: load_draft_model(kind_and_rest(name)[1], base) for name in names if _is_model(name)}
        # A model stands above cheaper ones only. Other drafters do not stand above anything.
        self._names = sorted(names, key=lambda name: _parameters(self._models[name]) if name in self._models else 0)

    def run(self, prompts: Sequence[Prompt]) -> Generator[str, None, Comparison]:
        """Measure, plan, and measure the planned stack. Yields what is measured next.

        Args:
            prompts: The sample, with plain decoding's answers.
        """
        levels = yield from self._measure(prompts)
        expected = compare_stacks(levels)
        requests = [prompt.request for prompt in prompts]
        taken = []
        for stack in dict.fromkeys([expected[0].levels, ()]):
            yield f"taking the time of {stack_name(stack)}"
            run = self._decode(self._base, self._stack(stack), requests, self._nodes)
            tokens = _tokens(run.accepted, whole=True)
            taken.append(Measured(stack, tokens, run.step / (tokens * run.rows)))
        return Comparison(levels, expected, taken)

    def _measure(self, prompts: Sequence[Prompt]) -> Generator[str, None, Levels]:
        names, count = self._names, len(self._names)
        requests, pieces = [prompt.request for prompt in prompts], list(_pieces(prompts))
        yield "measuring plain decoding"
        plain = self._decode(self._base, PlainDecoding(), requests, 0)
        blocks, drafting, reading = [0.0] * count, [0.0] * count, [0.0] * count
        acceptance, pricing = ([[empty] * (count + 1) for _ in names] for empty in (0.0, inf))
        for place, name in enumerate(names):
            yield f"measuring {name} for the base"
            drafter = self._lowest(name, self._base, self._nodes)
            run = self._decode(self._base, drafter, requests, self._nodes)
            if devices.is_asynchronous(self._base.device):  # there a step's parts have no times of their own
                run = replace(run, drafting=max(run.step - plain.step, 0.0), rest=min(run.step, plain.step))
            blocks[place], drafting[place] = float(drafter.spec.max_depth), run.drafting
            acceptance[place][-1] = acceptance_of(_tokens(run.accepted, whole=True), blocks[place])
            pricing[place][-1] = run.rest
        for above, model in ((place, self._models[name]) for place, name in enumerate(names) if name in self._models):
            reading[above] = _reading_seconds(model, requests) / max(plain.tokens, 1)
            for below in range(above):
                yield f"measuring {names[below]} for {names[above]}"
                nodes = LOWER_NODES * self._nodes
                run = self._decode(model, self._lowest(names[below], model, nodes), pieces, nodes)
                drafted = drafting[below] if devices.is_asynchronous(model.device) else run.drafting
                pricing[below][above] = max(run.step - drafted, 0.0)
                acceptance[below][above] = acceptance_of(_tokens(run.accepted, whole=False), blocks[below])
        return Levels(names, blocks, drafting, acceptance, pricing, reading, plain.step, plain.rows)

    def _lowest(self, name: str, verifier: BaseModel, nodes: int) -> Drafter:
        """Return a drafter as the lowest level, for the base or a draft model.

        It drafts a text from that text alone: of one that learns from others, a second measurement would say more.
        """
        if name in self._models:
            return ModelDrafter(self._models[name], verifier, nodes)
        return load_drafter(name, verifier, nodes, isolated=True)

    def _stack(self, levels: Sequence[str]) -> Drafter:
        """Return the drafter that consists of these levels, as `stack:…` names it."""
        if not levels:
            return PlainDecoding()
        nodes = self._nodes * LOWER_NODES ** (len(levels) - 1)
        drafter = self._lowest(levels[0], self._base, nodes)
        for name in levels[1:]:
            nodes //= LOWER_NODES
            drafter = StackedDrafter(drafter, self._models[name], self._base, nodes)
        return drafter

    def _decode(self, model: BaseModel, drafter: Drafter, requests: Sequence[Request], nodes: int) -> _Run:
        longest = max(len(one.prompt_ids) + one.sampling.max_new_tokens for one in requests)
        slots = min(self._slots, len(requests))
        config = EngineConfig(slots, max_length=longest, nodes=nodes, max_queue=len(requests))
        engine = Engine(model, drafter, self._tokenizer, config)
        decode_all(engine, requests[:slots])  # the first steps are slower
        before = engine.state()
        _, generations = decode_all(engine, requests)
        after = engine.state()
        steps = max(after.steps - before.steps, 1)
        spent = {
            stage: (seconds - before.stage_seconds[stage]) / steps for stage, seconds in after.stage_seconds.items()
        }
        drafting = spent["draft"] + spent["tree"]
        return _Run(
            drafting,
            sum(spent.values()) - drafting - spent["prefill"],
            (after.row_steps - before.row_steps) / steps,
            [one.counts.per_step_accepted for one in generations],
            sum(len(one.token_ids) for one in generations),
        )


def stack_name(levels: Sequence[str]) -> str:
    """Return a stack's name as `--drafter` takes it."""
    if len(levels) < 2:
        return levels[0] if levels else "none"
    return "stack:" + ">".join(levels)


def _is_model(name: str) -> bool:
    return kind_and_rest(name)[0] == "model" and len(leaf_names(name)) == 1


def _parameters(model: BaseModel) -> int:
    return sum(parameter.numel() for parameter in model.model.parameters())


def _pieces(prompts: Sequence[Prompt]) -> Iterator[Request]:
    """Return requests to continue the answers from several places in them, each up to the next place."""
    for prompt in prompts:
        answer = prompt.answer
        places = sorted({len(answer) * part // _PIECES for part in range(_PIECES + 1)})
        for start, stop in pairwise(places):
            sampling = replace(prompt.request.sampling, max_new_tokens=stop - start, ignore_eos=True)
            yield replace(prompt.request, prompt_ids=[*prompt.request.prompt_ids, *answer[:start]], sampling=sampling)


def _tokens(accepted: Sequence[Sequence[int]], *, whole: bool) -> float:
    """Return the tokens of a step. The last step of a request that is not `whole` may have been cut: it is left out."""
    steps = [count for one in accepted for count in (one if whole else one[:-1])]
    return 1.0 + sum(steps) / max(len(steps), 1)


@torch.inference_mode()
def _reading_seconds(model: BaseModel, requests: Sequence[Request]) -> float:
    """Return the seconds in which a model reads all prompts, one by one."""
    cache = model.new_cache(1, max(len(one.prompt_ids) for one in requests))
    texts = [torch.tensor(list(one.prompt_ids), device=model.device) for one in requests]
    devices.synchronise(model.device)
    start = time.perf_counter()
    for text in texts:
        model.prefill(cache, 0, [text.clamp_max(model.vocab_size - 1)])
    devices.synchronise(model.device)
    return time.perf_counter() - start
