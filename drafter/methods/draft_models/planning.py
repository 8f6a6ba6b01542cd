"""The best stack of drafters, by a shortest path over measured acceptances and latencies (HSD, arXiv 2510.19705).

A stack's lowest drafter proposes, every model above it prices and cuts what comes from below in one forward, and the
base verifies the rest. HSD's levels draft in several rounds until they have a fixed number of tokens; here each level
has one round a step, so a level passes on as many tokens as it expects to be accepted of what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Numbers = Sequence[float]


@dataclass(frozen=True)
class Levels:
    """What was measured of N drafters, in an order in which they may stand one above another, and of the base.

    Args:
        names: Of the drafters.
        blocks: Draft tokens of a path at most, of each as the lowest level.
        drafting: Seconds a step of each as the lowest level, for what the base is asked to verify.
        acceptance: `[N][N + 1]` probability that model `j` passes on what drafter `i` proposes for a token, or a token
            of its own that is as good to the level above; the last is the base, which accepts or does not.
        pricing: `[N][N + 1]` seconds a step of model `j` over what drafter `i` proposes; the last is the base. Infinite
            where `j` is no model.
        plain: Seconds of a step of the base without drafts.
        rows: Rows of a step, on average.
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
    """A stack without the base, and what it is expected to do.

    Args:
        levels: Indices of its drafters, from the lowest on.
        seconds: Of a step, up to the highest of them.
        block: Draft tokens that this one passes on.
    """

    levels: tuple[int, ...]
    seconds: float
    block: float


@dataclass(frozen=True)
class Expectation:
    """What decoding with a stack is expected to cost.

    Args:
        levels: Names of its drafters, from the lowest on; none is plain decoding.
        tokens: Tokens a row of a step.
        seconds: Of a step.
        per_token: Seconds for each token.
    """

    levels: tuple[str, ...]
    tokens: float
    seconds: float
    per_token: float


def expected_tokens(acceptance: float, block: float) -> float:
    """Return the tokens of a step, `(1 − α^(B + 1)) / (1 − α)`, of B drafted ones that are each accepted with α."""
    if acceptance >= 1.0 - 1e-9:
        return block + 1.0
    return (1.0 - math.pow(acceptance, block + 1.0)) / (1.0 - acceptance)


def acceptance_of(tokens: float, block: float) -> float:
    """Return the α for which `expected_tokens` is `tokens`, by bisection; 0 or 1 if there is none."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, block) < tokens else (low, middle)
    return (low + high) / 2


def block_of(tokens: float, acceptance: float, most: float) -> float:
    """Return the B for which `expected_tokens` is `tokens`; at most `most`, from 0 on."""
    if acceptance <= 1e-9 or acceptance >= 1.0 - 1e-9:
        return min(max(tokens - 1.0, 0.0), most)
    left = 1.0 - tokens * (1.0 - acceptance)
    return most if left <= 0.0 else min(max(math.log(left) / math.log(acceptance) - 1.0, 0.0), most)


def lowest(levels: Levels, drafter: int) -> Stack:
    """Return the stack of one drafter."""
    return Stack((drafter,), levels.drafting[drafter], levels.blocks[drafter])


def put_above(levels: Levels, stack: Stack, model: int) -> Stack:
    """Return a stack with a model above it: that passes on what it accepts, and its own token after that."""
    below = stack.levels[-1]
    return Stack(
        (*stack.levels, model),
        stack.seconds + levels.pricing[below][model],
        expected_tokens(levels.acceptance[below][model], stack.block),
    )


def expectation(levels: Levels, stack: Stack | None) -> Expectation:
    """Return what decoding with a stack, or plainly, is expected to cost."""
    if stack is None:
        return Expectation((), 1.0, levels.plain, levels.plain / levels.rows)
    below = stack.levels[-1]
    tokens = expected_tokens(levels.acceptance[below][-1], stack.block)
    seconds = stack.seconds + levels.pricing[below][-1]
    names = tuple(levels.names[level] for level in stack.levels)
    return Expectation(names, tokens, seconds, seconds / (tokens * levels.rows))


def compare_stacks(levels: Levels) -> list[Expectation]:
    """Return the expectations of the stacks that may be best, plain decoding included, the best first.

    A shortest path from the lowest levels to the base, whose labels have two numbers: of two stacks with the same
    highest level, one that takes longer and passes on less cannot become better by what comes above both.
    """
    kept: list[list[Stack]] = []
    for model in range(len(levels.names)):
        below = (stack for some in kept for stack in some if math.isfinite(levels.pricing[stack.levels[-1]][model]))
        kept.append(undominated([lowest(levels, model), *(put_above(levels, stack, model) for stack in below)]))
    found = [expectation(levels, stack) for stack in (None, *(stack for some in kept for stack in some))]
    return sorted(found, key=lambda one: one.per_token)


def undominated(stacks: Sequence[Stack]) -> list[Stack]:
    """Return the stacks than which no other takes as little time and passes on as much."""
    order = sorted(stacks, key=lambda stack: (stack.seconds, -stack.block))
    kept: list[Stack] = []
    for stack in order:
        if not kept or stack.block > kept[-1].block:
            kept.append(stack)
    return kept
