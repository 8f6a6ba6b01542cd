"""Decoding speed, side by side: transformers' `generate`, plain decoding in this engine, and each drafter.

    python -m benchmarks.decoding

Held-out GSM8K questions, greedy, the same token limit for all. Every round runs every arm, in an order that rotates;
at batch 1 the arms take turns prompt by prompt. Figures are medians over rounds. γ is the mean over prompts of
tokens/s (at larger batches: all tokens ÷ all seconds), divided by plain decoding's in the same round; β is new tokens
÷ base decode forwards. Stage shares come from a pass of their own, because taking them costs time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch

from benchmarks.harness import (
    StageClock,
    decode_all,
    environment,
    held_out_prompts,
    load_base,
    make_parser,
    markdown_table,
    run,
    synchronise,
    write_result,
)
from drafter.base_model import BaseModel
from drafter.drafters import ctc, ensemble, ngram
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine import Engine, EngineConfig
from drafter.statistics import DecodeCounts, mean_acceptance_length, total

TRANSFORMERS = "transformers"
PLAIN = "none"
STAGES = ("draft", "tree", "verify", "commit", "host")
_WARM_UP_PROMPTS = 4
_SEARCHES = [
    (ctc, "best_trie", "tree"),
    (ctc, "best_lattice_trie", "tree"),
    (ctc, "static_tree", "tree"),
    (ngram, "from_paths", "tree"),
    (ensemble, "merge", "tree"),
    # The lattice search calls the head's joint; that is drafting.
    (ctc.CTCHead, "with_labels", "draft"),
    (ctc.CTCHead, "log_probs", "draft"),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """What an arm made of some prompts.

    Args:
        seconds: From the first submission to the last token.
        outputs: New tokens of each prompt.
        counts: Of each prompt; empty for an arm that keeps none.
    """

    seconds: float
    outputs: list[list[int]]
    counts: list[DecodeCounts]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.outputs)) / self.seconds


Arm = Callable[[list[list[int]]], Run]
Round = list[Run]
"""One arm's runs in one round: one a prompt at batch 1, one for all prompts otherwise."""


def engine_arm(engine: Engine, max_new_tokens: int) -> Arm:
    """This project's engine."""

    def decode(prompts: list[list[int]]) -> Run:
        seconds, generations = decode_all(engine, prompts, max_new_tokens)
        return Run(seconds, [g.token_ids for g in generations], [g.counts for g in generations])

    return decode


def transformers_arm(base: BaseModel, batch: int, max_new_tokens: int, pad: int) -> Arm:
    """`generate` with its dynamic cache, in batches padded on the left, as its users call it."""

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=base.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=base.device)
        made = base.model.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad
        )
        return [_until_end(row, base.eos_token_ids) for row in made[:, width:].tolist()]

    def decode(prompts: list[list[int]]) -> Run:
        synchronise(base.device)
        start = time.perf_counter()
        outputs = [o for first in range(0, len(prompts), batch) for o in generate(prompts[first : first + batch])]
        synchronise(base.device)
        return Run(time.perf_counter() - start, outputs, [])

    return decode


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """`tokens` up to and with the first that ends the text; padding follows it."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def interleave(arms: Mapping[str, Arm], prompts: list[list[int]], batch: int, rounds: int) -> dict[str, list[Round]]:
    """Run every arm in every round, taking turns, so that a disturbance of the machine falls on all of them."""
    names, turn = list(arms), 0
    portions = [[prompt] for prompt in prompts] if batch == 1 else [prompts]
    runs: dict[str, list[Round]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append([])
        for portion in portions:
            for name in names[turn:] + names[:turn]:
                runs[name][-1].append(arms[name](portion))
            turn = (turn + 1) % len(names)
    return runs


def rate(one: Round) -> float:
    """Mean tokens/s over a round's runs."""
    return mean(run.rate for run in one)


def relative(runs: Sequence[Round], other: Sequence[Round]) -> float:
    """Median over rounds of the ratio of two arms' rates in the same round."""
    return median(rate(a) / rate(b) for a, b in zip(runs, other, strict=True))


def differing(runs: Sequence[Round], reference: Sequence[list[int]]) -> int:
    """Tokens, over all rounds, that are not those of the reference; a missing token differs."""
    return sum(
        max(len(output), len(expected)) - sum(a == b for a, b in zip(output, expected, strict=False))
        for one in runs
        for output, expected in zip((output for run in one for output in run.outputs), reference, strict=True)
    )


def stage_shares(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> dict[str, float]:
    """Share of decoding time spent in each of `STAGES`; the prefill does not count."""
    clock = StageClock(engine.base.device)
    stages = [
        (engine, "step", "host"),
        (engine, "_admit", "prefill"),
        (engine.drafter, "propose", "draft"),
        (engine, "_verify", "verify"),
        (engine, "_commit", "commit"),
        *_SEARCHES,
    ]
    with clock.timing(stages):
        decode_all(engine, prompts, max_new_tokens)
    decoding = sum(clock.seconds[stage] for stage in STAGES)
    return {stage: clock.seconds[stage] / decoding for stage in STAGES}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = make_parser(__doc__, prompts=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafters", nargs="*", default=["ngram", "ctc"], help="besides plain decoding")
    parser.add_argument("--nodes", type=int, help="most draft nodes of a step (default: 16 on a CPU, 64 on a GPU)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    base, tokenizer = load_base(args)
    prompts = held_out_prompts(tokenizer, 0, args.prompts)
    warm_up = held_out_prompts(tokenizer, args.prompts, _WARM_UP_PROMPTS)
    limit = args.max_new_tokens
    nodes = args.nodes or useful_nodes(base.device)
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)

    results: list[dict[str, Any]] = []
    reference: list[list[int]] | None = None
    for batch in args.batches:
        engines = {
            name: Engine(base, load_drafter(name, base, nodes + 1), tokenizer, EngineConfig(slots=batch))
            for name in dict.fromkeys([PLAIN, *args.drafters])
        }
        arms = {TRANSFORMERS: transformers_arm(base, batch, limit, pad)}
        arms |= {name: engine_arm(engine, limit) for name, engine in engines.items()}
        for arm in arms.values():
            arm(warm_up)
        runs = interleave(arms, prompts, batch, args.rounds)
        reference = reference or [output for run in runs[PLAIN][0] for output in run.outputs]
        for name in arms:
            counts = total(c for one in runs[name] for run in one for c in run.counts)
            result = {
                "batch": batch,
                "decoding": name,
                "tokens_per_second": median(map(rate, runs[name])),
                "tokens_per_second_by_round": [rate(one) for one in runs[name]],
                "gamma": relative(runs[name], runs[PLAIN]),
                "relative_to_transformers": relative(runs[name], runs[TRANSFORMERS]),
                "output_tokens": sum(len(o) for one in runs[name] for run in one for o in run.outputs),
                "differing_tokens": differing(runs[name], reference),
            }
            if name in engines:
                result["beta"] = mean_acceptance_length(counts)
                result["counts"] = {k: v for k, v in vars(counts).items() if k != "per_step_accepted"}
                result["stage_shares"] = stage_shares(engines[name], prompts, limit)
            results.append(result)
            print(f"batch {batch:3d}  {name:14s}{result['tokens_per_second']:10.1f} tokens/s", flush=True)

    settings = {key: value for key, value in vars(args).items() if key not in ("model", "output")}
    record = {"benchmark": "decoding", "environment": environment(base), "settings": settings, "results": results}
    print("\n" + markdown_table([_row(result) for result in results]))
    write_result("decoding", args.output, record)


def _row(result: Mapping[str, Any]) -> dict[str, object]:
    shares = result.get("stage_shares")
    return {
        "batch": result["batch"],
        "decoding": result["decoding"],
        "tokens/s": f"{result['tokens_per_second']:.0f}",
        "γ": f"{result['gamma']:.2f}",
        "× transformers": f"{result['relative_to_transformers']:.2f}",
        "β": f"{result['beta']:.2f}" if "beta" in result else "",
        "differing tokens": f"{result['differing_tokens']} of {result['output_tokens']}",
        " / ".join(STAGES): " / ".join(f"{shares[stage]:.0%}" for stage in STAGES) if shares else "",
    }


if __name__ == "__main__":
    run(main)
