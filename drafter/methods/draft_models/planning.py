"""Plans the best stack of drafters: a shortest path over measured acceptances and latencies (HSD, arXiv 2510.19705).

The lowest drafter proposes, each model above scores and prunes in one forward, and the target model verifies the rest.
HSD's levels draft in rounds up to a fixed number of tokens; here each has one round per step, so it passes on as many
tokens as it expects to be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Numbers = Sequence[float]


@dataclass(frozen=True)
class Levels:
    """Measurements of N drafters, in the order in which they may be stacked, and of the target model.

    Args:
        names: Of the drafters.
        blocks: Longest draft path of each as the lowest level.
        drafting: Seconds per step of each as the lowest level.
        acceptance: `[N][N + 1]` probability that model `j` passes on what drafter `i` proposes for a token, or a token
            of its own that is as good to the level above; the last is the target model, which accepts or does not.
        pricing: `[N][N + 1]` seconds per step of model `j` over what drafter `i` proposes; the last is the target
            model. Infinite where `j` is no model.
        plain: Seconds of a plain decoding step.
        rows: Mean rows of a step.
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
    """A stack without the target model, and its expected performance.

    Args:
        levels: Indices of its drafters, lowest first.
        seconds: Of a step, up to the highest of them.
        block: Draft tokens that it passes on.
    """

    levels: tuple[int, ...]
    seconds: float
    block: float


@dataclass(frozen=True)
class Expectation:
    """Expected cost of decoding with a stack.

    Args:
        levels: Names of its drafters, lowest first; empty is plain decoding.
        tokens: Tokens per row and step.
        seconds: Of a step.
        per_token: Seconds per token.
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


def lowest(levels: Levels, drafter: int) -> Stack:
    return Stack((drafter,), levels.drafting[drafter], levels.blocks[drafter])


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
        kept.append(undominated([lowest(levels, model), *(put_above(levels, stack, model) for stack in below)]))
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
