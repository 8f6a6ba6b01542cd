"""Measures drafters on sample prompts, and plans the best stack of them (HSD, arXiv 2510.19705): a shortest path.

The lowest drafter proposes, each model above scores and prunes in one forward, and the target model verifies the rest.
HSD's levels draft in rounds up to a fixed number of tokens; here each has one round per step, so it passes on as many
tokens as it expects to be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter import devices
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.names import kind_and_rest, leaf_names
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.questions import Prompt
from drafter.evaluation.results import write_json
from drafter.methods.draft_models.drafter import LOWER_NODES, ModelDrafter, StackedDrafter, load_draft_model
from drafter.requests import Request
from drafter.target.model import BaseModel

Numbers = Sequence[float]


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
class Expectation:
    """Expected cost of decoding with a stack: tokens per row and step, seconds per step, seconds per token.

    `levels` are the names of its drafters, lowest first; none is plain decoding.
    """

    levels: tuple[str, ...]
    tokens: float
    seconds: float
    per_token: float


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


def expectation(levels: Levels, stack: Stack | None) -> Expectation:
    """Return the expected cost of decoding with a stack, or plainly for None."""
    if stack is None:
        return Expectation((), 1.0, levels.plain, levels.plain / levels.rows)
    below = stack.levels[-1]
    tokens = expected_tokens(levels.acceptance[below][-1], stack.block)
    seconds = stack.seconds + levels.pricing[below][-1]
    names = tuple(levels.names[level] for level in stack.levels)
    return Expectation(names, tokens, seconds, seconds / (tokens * levels.rows))


def compare_stacks(levels: Levels) -> list[Expectation]:
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


@dataclass(frozen=True)
class Measured:
    """Measured cost of a stack; see `Expectation`. Prefills are not counted."""

    levels: tuple[str, ...]
    tokens: float
    per_token: float


@dataclass(frozen=True)
class Comparison:
    """A plan from `measured` inputs, best stack first, and held-out measurements of the best and of plain decoding."""

    measured: Levels
    expected: list[Expectation]
    taken: list[Measured]


@dataclass(frozen=True)
class _Run:
    """Mean seconds of drafting and of the rest of a step, without prefills; rows of a step; tokens per row and step."""

    drafting: float
    rest: float
    rows: float
    tokens: float

    @property
    def step(self) -> float:
        return self.drafting + self.rest


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
        levels = yield from self._measure(prompts)
        expected = compare_stacks(levels)
        requests = [prompt.request for prompt in held_out]
        taken = []
        for stack in dict.fromkeys([expected[0].levels, ()]):
            yield f"taking the time of {stack_name(stack)}"
            run = self._decode(self._stack(stack), requests)
            taken.append(Measured(stack, run.tokens, run.step / (run.tokens * run.rows)))
        return Comparison(levels, expected, taken)

    def _measure(self, prompts: Sequence[Prompt]) -> Generator[str, None, Levels]:
        names, count = self._names, len(self._names)
        requests = [prompt.request for prompt in prompts]
        yield "measuring plain decoding"
        plain = self._decode(PlainDecoding(), requests)
        blocks, drafting = [0.0] * count, [0.0] * count
        acceptance, pricing = ([[empty] * (count + 1) for _ in names] for empty in (0.0, math.inf))
        for place, name in enumerate(names):
            yield f"measuring {name} for the target model"
            drafter = self._stack((name,))
            run = self._decode(drafter, requests)
            blocks[place], drafting[place] = float(drafter.spec.max_depth), self._drafting(run, plain)
            acceptance[place][-1] = acceptance_of(run.tokens, blocks[place])
            pricing[place][-1] = run.step - drafting[place]
        models = [place for place, name in enumerate(names) if name in self._models]
        for below, above in ((lower, model) for model in models for lower in range(model)):
            stack = (names[below], names[above])
            yield f"measuring {stack_name(stack)}"
            run = self._decode(self._stack(stack), requests)
            # Counted as the block of the model's own tokens with the same acceptance length.
            passed = block_of(run.tokens, acceptance[above][-1], blocks[below] + 1.0)
            acceptance[below][above] = acceptance_of(passed, blocks[below])
            pricing[below][above] = max(self._drafting(run, plain) - drafting[below], 0.0)
        return Levels(names, blocks, drafting, acceptance, pricing, plain.step, plain.rows)

    def _drafting(self, run: _Run, plain: _Run) -> float:
        """Return the seconds of drafting per step. On a GPU the stages have no times of their own."""
        return max(run.step - plain.step, 0.0) if devices.is_asynchronous(self._base.device) else run.drafting

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

    def _decode(self, drafter: Drafter, requests: Sequence[Request]) -> _Run:
        longest = max(len(one.prompt_ids) + one.sampling.over().max_new_tokens for one in requests)
        slots = min(self._slots, len(requests))
        config = EngineConfig(slots, max_model_len=longest, num_draft_tokens=self._nodes, max_queue=len(requests))
        engine = Engine(self._base, drafter, self._tokenizer, config)
        decode_all(engine, requests[:slots])  # warm-up
        before = engine.state()
        decode_all(engine, requests)
        after = engine.state()
        steps, row_steps = max(after.steps - before.steps, 1), after.row_steps - before.row_steps
        spent = {
            stage: (seconds - before.stage_seconds[stage]) / steps for stage, seconds in after.stage_seconds.items()
        }
        drafting = spent["draft"] + spent["tree"]
        return _Run(
            drafting,
            sum(spent.values()) - drafting - spent["prefill"],
            row_steps / steps,
            (after.output_tokens - before.output_tokens) / max(row_steps, 1),
        )


def stack_name(levels: Sequence[str]) -> str:
    """Return a stack's name as `--drafter` takes it."""
    if len(levels) < 2:
        return levels[0] if levels else "none"
    return "stack:" + ">".join(levels)


def stack_table(found: Comparison) -> str:
    """Return the compared stacks as a Markdown table, best first, with held-out measurements where there are any."""
    taken = {one.levels: one for one in found.taken}
    lines = [
        "| drafter | expected ms a token | tokens a step | ms a step | measured ms a token | difference | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found.expected:
        measured = taken.get(one.levels)
        cells = [""] * 3
        if measured is not None:
            difference = measured.per_token / one.per_token - 1.0
            cells = [f"{1000 * measured.per_token:.2f}", f"{difference:+.0%}", f"{measured.tokens:.2f}"]
        numbers = [f"{1000 * one.per_token:.2f}", f"{one.tokens:.2f}", f"{1000 * one.seconds:.2f}", *cells]
        lines.append(f"| `{stack_name(one.levels)}` | {' | '.join(numbers)} |")
    return "\n".join(lines)


def acceptance_table(found: Comparison) -> str:
    """Return a Markdown table of acceptance rates: drafters by models."""
    levels = found.measured
    models = [place for place in range(len(levels.names)) if any(math.isfinite(row[place]) for row in levels.pricing)]
    heads = [f"`{levels.names[place]}`" for place in models]
    lines = [f"| drafted by | {' | '.join([*heads, 'the target model'])} |", "|---" * (len(models) + 2) + "|"]
    for name, accepted, priced in zip(levels.names, levels.acceptance, levels.pricing, strict=True):
        cells = [f"{accepted[place]:.2f}" if math.isfinite(priced[place]) else "" for place in [*models, -1]]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_stacks(found: Comparison, environment: dict[str, Any], folder: Path) -> list[Path]:
    """Write `stacks.json` and `stacks.md` to `folder`; return their paths."""
    values = asdict(found)
    pricing = values["measured"]["pricing"]
    values["measured"]["pricing"] = [[one if math.isfinite(one) else None for one in row] for row in pricing]
    best = stack_name(found.expected[0].levels)
    write_json(folder / "stacks.json", {"environment": environment, "best": best} | values)
    (folder / "stacks.md").write_text(f"{stack_table(found)}\n\n{acceptance_table(found)}\n", encoding="utf-8")
    return [folder / "stacks.json", folder / "stacks.md"]
