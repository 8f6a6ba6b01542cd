"""Measures drafters on sample prompts, and plans the best stack of them (HSD, arXiv 2510.19705): a shortest path.

The lowest drafter proposes, each model above scores and prunes in one forward, and the target model verifies the rest.
HSD's levels draft in rounds up to a fixed number of tokens; here each has one round per step, so it passes on as many
tokens as it expects to be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter import devices
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.model_drafter import ModelDrafter
from drafter.drafters.names import kind_and_rest, leaf_names
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import Run, decode_all, room_for, warm_up
from drafter.evaluation.questions import Prompt
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.methods.draft_models.drafter import LOWER_NODES, StackedDrafter, load_draft_model
from drafter.requests import Request
from drafter.statistics import mean_acceptance_length, total
from drafter.target.model import BaseModel

Numbers = Sequence[float]
Names = tuple[str, ...]
"""A stack's drafters, lowest first; none is plain decoding."""


@dataclass(frozen=True)
class Levels:
    """Measurements of N drafters, in the order in which they may be stacked, and of the target model.

    Args:
        blocks: Longest draft path of each as the lowest level.
        drafting: Seconds per step of each as the lowest level.
        acceptance: `[N][N + 1]` probability that model `j` passes on what drafter `i` proposes for a token, or a token
            of its own that is as good to the level above; the last is the target model, which accepts or does not.
        pricing: `[N][N + 1]` seconds per step of model `j` over what drafter `i` proposes; the last is the target
            model. Infinite where `j` is no model.
        plain: Seconds of a plain decoding step, of `rows` rows on average.
    """

    names: Sequence[str]
    blocks: Numbers
    drafting: Numbers
    acceptance: Sequence[Numbers]
    pricing: Sequence[Numbers]
    plain: float
    rows: float = 1.0


@dataclass(frozen=True)
class Stack:
    """Indices of a stack's drafters, lowest first; seconds of a step up to the highest; draft tokens passed on."""

    levels: tuple[int, ...]
    seconds: float
    block: float


@dataclass(frozen=True)
class Cost:
    """Cost of decoding with a stack: tokens per row and step, seconds per step without prefills, seconds per token."""

    levels: Names
    tokens: float
    seconds: float
    per_token: float


@dataclass(frozen=True)
class Comparison:
    """A plan from `measured` inputs, best stack first, and held-out measurements of the best and of plain decoding."""

    measured: Levels
    expected: list[Cost]
    taken: list[Cost]


def expected_tokens(acceptance: float, block: float) -> float:
    """Return the expected tokens of a step, `(1 − α^(B + 1)) / (1 − α)`, with B draft tokens of acceptance α each."""
    if acceptance >= 1.0 - 1e-9:
        return block + 1.0
    return (1.0 - math.pow(acceptance, block + 1.0)) / (1.0 - acceptance)


def acceptance_of(tokens: float, block: float) -> float:
    """Invert `expected_tokens` for α by bisection; 0 or 1 if there is no solution."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, block) < tokens else (low, middle)
    return (low + high) / 2


def block_of(tokens: float, acceptance: float, most: float) -> float:
    """Invert `expected_tokens` for B, clamped to `[0, most]`."""
    if acceptance <= 1e-9 or acceptance >= 1.0 - 1e-9:
        return min(max(tokens - 1.0, 0.0), most)
    left = 1.0 - tokens * (1.0 - acceptance)
    return most if left <= 0.0 else min(max(math.log(left) / math.log(acceptance) - 1.0, 0.0), most)


def put_above(levels: Levels, stack: Stack, model: int) -> Stack:
    """Return a stack with a model on top, which passes on what it accepts and one token of its own."""
    below = stack.levels[-1]
    return Stack(
        (*stack.levels, model),
        stack.seconds + levels.pricing[below][model],
        expected_tokens(levels.acceptance[below][model], stack.block),
    )


def expectation(levels: Levels, stack: Stack | None) -> Cost:
    """Return the expected cost of decoding with a stack, or plainly for None."""
    if stack is None:
        return Cost((), 1.0, levels.plain, levels.plain / levels.rows)
    below = stack.levels[-1]
    tokens = expected_tokens(levels.acceptance[below][-1], stack.block)
    seconds = stack.seconds + levels.pricing[below][-1]
    names = tuple(levels.names[level] for level in stack.levels)
    return Cost(names, tokens, seconds, seconds / (tokens * levels.rows))


def compare_stacks(levels: Levels) -> list[Cost]:
    """Return the stacks that may be best, plain decoding included, best first.

    A shortest-path search with two labels: of two stacks with the same top level, one that is slower and passes on less
    is dominated whatever comes above.
    """
    kept: list[list[Stack]] = []
    for model in range(len(levels.names)):
        below = (stack for some in kept for stack in some if math.isfinite(levels.pricing[stack.levels[-1]][model]))
        alone = Stack((model,), levels.drafting[model], levels.blocks[model])
        kept.append(undominated([alone, *(put_above(levels, stack, model) for stack in below)]))
    found = [expectation(levels, stack) for stack in (None, *(stack for some in kept for stack in some))]
    return sorted(found, key=lambda one: one.per_token)


def undominated(stacks: Sequence[Stack]) -> list[Stack]:
    """Return the Pareto front over (seconds, block)."""
    order = sorted(stacks, key=lambda stack: (stack.seconds, -stack.block))
    kept: list[Stack] = []
    for stack in order:
        if not kept or stack.block > kept[-1].block:
            kept.append(stack)
    return kept


class StackPlanning:
    """Measures drafters, plans the best stack of them, and measures it.

    Args:
        names: Training-free drafters, and `model:…`; raises `LoadError` for others.
        nodes: Draft nodes that the target model verifies.
        slots: Requests decoded together.
    """

    def __init__(self, base: BaseModel, tokenizer: Any, names: Sequence[str], nodes: int, slots: int) -> None:
        self._base, self._tokenizer, self._nodes, self._slots = base, tokenizer, nodes, slots
        for name in names:
            if kind_and_rest(name)[0] != "model" and not set(leaf_names(name)) <= TRAINING_FREE.keys() - {"none"}:
                raise LoadError(
                    f"drafter {name!r} cannot be planned with: use model:PATH_OR_HUB_ID, "
                    f"{', '.join(sorted(TRAINING_FREE.keys() - {'none'}))}, or several of these joined by '+'"
                )
        alone = [name for name in names if kind_and_rest(name)[0] == "model" and len(leaf_names(name)) == 1]
        self._models = {name: load_draft_model(kind_and_rest(name)[1], base) for name in alone}
        # A model stands only above cheaper drafters; others are always the lowest level.
        sizes = {name: sum(map(Tensor.numel, one.model.parameters())) for name, one in self._models.items()}
        self._names = sorted(names, key=lambda name: sizes.get(name, 0))

    def run(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Generator[str, None, Comparison]:
        """Plan by `prompts` and measure the plan on `held_out` ones. Yields a progress line before each measurement."""
        pairs = [pair for pair in combinations(self._names, 2) if pair[1] in self._models]
        runs: dict[Names, Run] = {}
        for stack in [(), *((name,) for name in self._names), *pairs]:
            yield f"measuring {stack_name(stack) if stack else 'plain decoding'}"
            runs[stack] = self._decode(stack, [prompt.request for prompt in prompts])
        levels = self._levels(runs)
        expected = compare_stacks(levels)
        taken = []
        for stack in dict.fromkeys([expected[0].levels, ()]):
            yield f"taking the time of {stack_name(stack)}"
            taken.append(cost_of(stack, self._decode(stack, [prompt.request for prompt in held_out])))
        return Comparison(levels, expected, taken)

    def _levels(self, runs: Mapping[Names, Run]) -> Levels:
        """Derive the levels from runs of plain decoding, of each drafter alone, and of each pair."""
        names, costs = self._names, {stack: cost_of(stack, run) for stack, run in runs.items()}
        plain = costs[()]

        def drafted(stack: Names) -> float:
            """Return the seconds of drafting per step. On a GPU the stages have no times of their own."""
            if devices.is_asynchronous(self._base.device):
                return max(costs[stack].seconds - plain.seconds, 0.0)
            return (runs[stack].stages["draft"] + runs[stack].stages["tree"]) / runs[stack].steps

        blocks = [float(self._stack((name,)).spec.max_depth) for name in names]
        drafting = [drafted((name,)) for name in names]
        acceptance, pricing = ([[empty] * (len(names) + 1) for _ in names] for empty in (0.0, math.inf))
        for place, name in enumerate(names):
            acceptance[place][-1] = acceptance_of(costs[name,].tokens, blocks[place])
            pricing[place][-1] = costs[name,].seconds - drafting[place]
        for below, above in combinations(range(len(names)), 2):
            pair = names[below], names[above]
            if pair in costs:
                # Counted as the block of the model's own tokens with the same acceptance length.
                passed = block_of(costs[pair].tokens, acceptance[above][-1], blocks[below] + 1.0)
                acceptance[below][above] = acceptance_of(passed, blocks[below])
                pricing[below][above] = max(drafted(pair) - drafting[below], 0.0)
        rows = plain.seconds / (plain.per_token * plain.tokens)
        return Levels(names, blocks, drafting, acceptance, pricing, plain.seconds, rows)

    def _stack(self, levels: Sequence[str]) -> Drafter:
        """Build the drafter of these levels. The lowest is isolated, because the sample is decoded more than once."""
        if not levels:
            return PlainDecoding()
        nodes = self._nodes * LOWER_NODES ** (len(levels) - 1)
        model = self._models.get(levels[0])
        drafter: Drafter = (
            load_drafter(levels[0], self._base, nodes, isolated=True)
            if model is None
            else ModelDrafter(model, self._base, nodes)
        )
        for name in levels[1:]:
            nodes //= LOWER_NODES
            drafter = StackedDrafter(drafter, self._models[name], self._base, nodes)
        return drafter

    def _decode(self, levels: Sequence[str], requests: Sequence[Request]) -> Run:
        config = room_for(requests, min(self._slots, len(requests)), num_draft_tokens=self._nodes)
        decode = partial(decode_all, Engine(self._base, self._stack(levels), self._tokenizer, config))
        warm_up(decode, requests, config.max_num_seqs)
        return decode(requests)


def cost_of(levels: Names, run: Run) -> Cost:
    """Return the measured cost of decoding with a stack."""
    seconds = sum(run.stages.values()) - run.stages["prefill"]
    return Cost(levels, mean_acceptance_length(total(run.counts)), seconds / run.steps, seconds / run.num_tokens)


def stack_name(levels: Sequence[str]) -> str:
    """Return a stack's name as `--drafter` takes it."""
    if len(levels) < 2:
        return levels[0] if levels else "none"
    return "stack:" + ">".join(levels)


def stack_table(found: Comparison) -> str:
    """Return the compared stacks as a Markdown table, best first, with held-out measurements where there are any."""
    taken, rows = {one.levels: one for one in found.taken}, []
    for one in found.expected:
        measured = taken.get(one.levels)
        rows.append(
            {
                "drafter": f"`{stack_name(one.levels)}`",
                "expected ms a token": f"{1000 * one.per_token:.2f}",
                "tokens a step": f"{one.tokens:.2f}",
                "ms a step": f"{1000 * one.seconds:.2f}",
                "measured ms a token": f"{1000 * measured.per_token:.2f}" if measured else "",
                "difference": f"{measured.per_token / one.per_token - 1.0:+.0%}" if measured else "",
                "tokens": f"{measured.tokens:.2f}" if measured else "",
            }
        )
    return markdown_table(rows)


def acceptance_table(found: Comparison) -> str:
    """Return a Markdown table of acceptance rates: drafters by models."""
    levels = found.measured
    models = [place for place in range(len(levels.names)) if any(math.isfinite(row[place]) for row in levels.pricing)]
    columns = {**{place: f"`{levels.names[place]}`" for place in models}, -1: "the target model"}
    rows = zip(levels.names, levels.acceptance, levels.pricing, strict=True)
    return markdown_table(
        [
            {"drafted by": f"`{name}`"}
            | {head: f"{accepted[at]:.2f}" if math.isfinite(priced[at]) else "" for at, head in columns.items()}
            for name, accepted, priced in rows
        ]
    )


def write_stacks(found: Comparison, environment: dict[str, Any], folder: Path) -> list[Path]:
    """Write `stacks.json` and `stacks.md` to `folder`; return their paths."""
    values = asdict(found)
    pricing = values["measured"]["pricing"]
    values["measured"]["pricing"] = [[one if math.isfinite(one) else None for one in row] for row in pricing]
    best = stack_name(found.expected[0].levels)
    write_json(folder / "stacks.json", {"environment": environment, "best": best} | values)
    (folder / "stacks.md").write_text(f"{stack_table(found)}\n\n{acceptance_table(found)}\n", encoding="utf-8")
    return [folder / "stacks.json", folder / "stacks.md"]
