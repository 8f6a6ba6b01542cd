"""Measures drafters on sample prompts, and plans the best stack of them (HSD, arXiv 2510.19705): a shortest path.

    python -m recipes.stacks cacheback model:SMALLER model:SMALL --model MODEL --input sample.jsonl

The lowest drafter proposes, each model above scores and prunes in one forward, and the target model verifies the rest.
HSD's levels draft in rounds up to a fixed number of tokens; here each has one round per step, so it passes on as many
tokens as it expects to be accepted. All seconds are of a step, divided by its rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from drafter import devices
from drafter.drafters.names import kind_and_rest, leaf_names
from drafter.drafters.registry import TRAINING_FREE, load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import Run, decode_all, room_for, warm_up
from drafter.evaluation.questions import QuestionError, prompts_of, read_questions
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

Numbers = Sequence[float]
Names = tuple[str, ...]
"""A stack's drafters, lowest first; none is plain decoding."""


@dataclass(frozen=True)
class Levels:
    """Measurements of N drafters, in the order in which they may be stacked, and of the target model.

    Args:
        blocks: Longest draft path of each as the lowest level.
        drafting: Seconds of each as the lowest level.
        acceptance: `[N][N + 1]` probability that model `j` passes on what drafter `i` proposes for a token, or a token
            of its own that is as good to the level above; the last is the target model, which accepts or does not.
        pricing: `[N][N + 1]` seconds of model `j` over what drafter `i` proposes; the last is the target model.
            Infinite where `j` is no model.
        plain: Seconds of plain decoding.
    """

    names: Sequence[str]
    blocks: Numbers
    drafting: Numbers
    acceptance: Sequence[Numbers]
    pricing: Sequence[Numbers]
    plain: float


@dataclass(frozen=True)
class Stack:
    """Indices of a stack's drafters, lowest first; seconds up to the highest; draft tokens passed on."""

    levels: tuple[int, ...]
    seconds: float
    block: float


@dataclass(frozen=True)
class Cost:
    """Cost of decoding with a stack: tokens and seconds of a step of a row, without prefills."""

    levels: Names
    tokens: float
    seconds: float

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


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


def expectation(levels: Levels, stack: Stack) -> Cost:
    below = stack.levels[-1]
    tokens = expected_tokens(levels.acceptance[below][-1], stack.block)
    return Cost(tuple(levels.names[one] for one in stack.levels), tokens, stack.seconds + levels.pricing[below][-1])


def compare_stacks(levels: Levels) -> list[Cost]:
    """Return the stacks that may be best, plain decoding included, best first.

    A shortest-path search with two labels: of two stacks with the same top level, one that is slower and passes on less
    is dominated whatever comes above.
    """
    kept: list[Stack] = []
    for model in range(len(levels.names)):
        above = [put_above(levels, one, model) for one in kept if math.isfinite(levels.pricing[one.levels[-1]][model])]
        longest = -1.0
        stacks = [Stack((model,), levels.drafting[model], levels.blocks[model]), *above]
        for stack in sorted(stacks, key=lambda one: (one.seconds, -one.block)):
            if stack.block > longest:
                kept.append(stack)
                longest = stack.block
    found = [Cost((), 1.0, levels.plain), *(expectation(levels, stack) for stack in kept)]
    return sorted(found, key=lambda one: one.per_token)


def measure_levels(
    base: BaseModel, tokenizer: Any, names: Sequence[str], nodes: int, requests: Sequence[Request], slots: int
) -> tuple[Levels, list[Cost]]:
    """Decode requests plainly, with each drafter, and with each stack of two; return the levels and these costs.

    Args:
        names: Training-free drafters, and `model:…`, which may stand above those before it; raises `LoadError` for
            others.
        nodes: Draft nodes that the target model verifies.
        slots: Requests decoded together.
    """
    for name in names:
        if kind_and_rest(name)[0] != "model" and not set(leaf_names(name)) <= TRAINING_FREE.keys() - {"none"}:
            raise LoadError(
                f"drafter {name!r} cannot be planned with: use model:PATH_OR_HUB_ID, "
                f"{', '.join(sorted(TRAINING_FREE.keys() - {'none'}))}, or several of these joined by '+'"
            )
    models = {name for name in names if kind_and_rest(name)[0] == "model" and len(leaf_names(name)) == 1}
    pairs = [pair for pair in combinations(names, 2) if pair[1] in models]
    config = room_for(requests, min(slots, len(requests)), num_draft_tokens=nodes)
    runs: dict[Names, Run] = {}
    blocks: dict[Names, float] = {}
    for stack in [(), *((name,) for name in names), *pairs]:
        # Isolated, because the sample is decoded more than once.
        drafter = load_drafter(stack_name(stack), base, nodes, isolated=True)
        decode = partial(decode_all, Engine(base, drafter, tokenizer, config))
        warm_up(decode, requests, config.max_num_seqs)
        runs[stack], blocks[stack] = decode(requests), float(drafter.spec.max_depth)
    asynchronous = devices.is_asynchronous(base.device)
    return levels_of(names, runs, blocks, asynchronous=asynchronous), [_cost(*one) for one in runs.items()]


def _cost(stack: Names, run: Run) -> Cost:
    counts = total(run.counts)
    seconds = sum(run.stages.values()) - run.stages["prefill"]
    return Cost(stack, mean_acceptance_length(counts), seconds / counts.num_decode_steps)


def levels_of(
    names: Sequence[str], runs: Mapping[Names, Run], blocks: Mapping[Names, float], *, asynchronous: bool
) -> Levels:
    """Derive the levels from runs of plain decoding, of each drafter alone, and of pairs, with their `blocks`."""
    costs = {stack: _cost(stack, run) for stack, run in runs.items()}

    def drafted(*stack: str) -> float:
        if asynchronous:  # on a GPU the stages have no times of their own
            return max(costs[stack].seconds - costs[()].seconds, 0.0)
        return (runs[stack].stages["draft"] + runs[stack].stages["tree"]) / total(runs[stack].counts).num_decode_steps

    count = len(names)
    acceptance, pricing = ([[empty] * (count + 1) for _ in names] for empty in (0.0, math.inf))
    for place, name in enumerate(names):
        acceptance[place][-1] = acceptance_of(costs[name,].tokens, blocks[name,])
        pricing[place][-1] = costs[name,].seconds - drafted(name)
    for below, above in combinations(range(count), 2):
        if (pair := (names[below], names[above])) in costs:
            # Counted as the block of the model's own tokens with the same acceptance length.
            block = blocks[names[below],]
            passed = block_of(costs[pair].tokens, acceptance[above][-1], block + 1.0)
            acceptance[below][above] = acceptance_of(passed, block)
            pricing[below][above] = max(drafted(*pair) - drafted(names[below]), 0.0)
    alone = [drafted(name) for name in names]
    return Levels(names, [blocks[name,] for name in names], alone, acceptance, pricing, costs[()].seconds)


def stack_name(levels: Sequence[str]) -> str:
    """Return a stack's name as `--drafter` takes it."""
    if len(levels) < 2:
        return levels[0] if levels else "none"
    return "stack:" + ">".join(levels)


def stack_table(expected: Sequence[Cost], measured: Sequence[Cost]) -> str:
    """Return the compared stacks as a Markdown table, beside what was measured."""
    known = {one.levels: one for one in measured}
    return markdown_table(
        [
            {
                "drafter": f"`{stack_name(one.levels)}`",
                "expected ms a token": f"{1000 * one.per_token:.2f}",
                "tokens a step": f"{one.tokens:.2f}",
                "measured ms a token": f"{1000 * known[one.levels].per_token:.2f}" if one.levels in known else "",
                "tokens": f"{known[one.levels].tokens:.2f}" if one.levels in known else "",
            }
            for one in expected
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stacks that a command line asks for, the best first; return 1 if they cannot be measured."""
    parser = argparse.ArgumentParser(
        "python -m recipes.stacks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", help="the cheapest first; model:… may stand above those before it")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="target model (default: the embedded one)")
    parser.add_argument("--input", required=True, help="a sample of the prompts: JSON lines, as of drafter evaluate")
    parser.add_argument("--questions", type=int, default=16, help="number of prompts, spread evenly over the file")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    try:
        base, tokenizer = load_base(args.model), load_tokenizer(args.model)
        sampling = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
        prompts = prompts_of(base, tokenizer, read_questions(args.input, args.questions), slots=args.batch, **sampling)
        requests = [prompt.request for prompt in prompts]
        levels, found = measure_levels(base, tokenizer, args.drafters, useful_nodes(base.device), requests, args.batch)
    except (LoadError, QuestionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    expected = compare_stacks(levels)
    print(f"{stack_table(expected, found)}\n\nbest:     --drafter '{stack_name(expected[0].levels)}'", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
