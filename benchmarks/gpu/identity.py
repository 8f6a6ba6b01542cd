"""Identity: tokens of every drafter and batch beside plain decoding's alone, in fp32 and in bf16, which rounds."""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from benchmarks.speed import prompts_of
from drafter.drafters.contract import Drafter
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all, differing_tokens, room_for
from drafter.heads.checkpoint import new_head
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

NODES = 16
_UNTRAINED = ("medusa", "hydra", "eagle3")


def drafters(plan: Plan) -> list[str]:
    """Names of the drafters that every stage tries: those without weights, the plan's, and untrained heads."""
    heads = _UNTRAINED if plan.model == str(EMBEDDED_BASE) else ()
    return ["none", "ngram", "memory", "cacheback", plan.drafter, f"{plan.drafter}+ngram", *heads]


def loaded(name: str, base: BaseModel, nodes: int = NODES) -> Drafter:
    """Load one of `drafters`. No token and no graph depends on what a head has learnt."""
    if name not in _UNTRAINED:
        return load_drafter(name, base, nodes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return new_head(name, base, {}).to(base.dtype).eval().requires_grad_(False).drafter(base, nodes)


def cells(plan: Plan) -> list[Key]:
    """All combinations; in bf16 the share of tokens that differ is what is asked, in fp32 it has to be none."""
    batches, temperatures = ([3], [1.0]) if plan.tiny else ([1, 16], [0.0, 1.0])
    return [
        {"dtype": dtype, "drafter": name, "batch": batch, "temperature": temperature}
        for dtype in ("float32", "bfloat16")
        for temperature in temperatures
        for batch in batches
        for name in drafters(plan)
    ]


def prepare(plan: Plan) -> Measure:
    """See `Stage`."""
    tokenizer = load_tokenizer(plan.model)
    count, tokens = (3, 8) if plan.tiny else (16, 48)
    prompts = prompts_of(tokenizer, "short", count)
    base_in = cache(lambda dtype: load_base(plan.model, dtype=dtype))

    def decoded(dtype: str, name: str, batch: int, temperature: float) -> list[list[int]]:
        base: BaseModel = base_in(dtype)
        requests = [
            Request(ids, SamplingParams(tokens, temperature=temperature, seed=seed)) for seed, ids in enumerate(prompts)
        ]
        config = room_for(requests, batch, num_draft_tokens=NODES)
        engine = Engine(base, loaded(name, base), tokenizer, config)
        return decode_all(engine, requests).outputs

    alone = cache(lambda dtype, temperature: decoded(dtype, "none", 1, temperature))

    def measure(cell: Key) -> Values:
        expected = alone(cell["dtype"], cell["temperature"])
        found = decoded(cell["dtype"], cell["drafter"], cell["batch"], cell["temperature"])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {
            "tokens": sum(map(len, expected)),
            "differing": sum(differing_tokens(*both) for both in zip(found, expected, strict=True)),
            "texts": len(expected),
            "differing texts": sum(ours != theirs for ours, theirs in zip(found, expected, strict=True)),
        }

    return measure


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {**cell, **values, "share": f"{values['differing'] / values['tokens']:.2%}"}


STAGE = Stage(
    "identity",
    "Tokens that are not plain decoding's, alone, of the same base.",
    cells,
    prepare,
    row,
    first=lambda cell: cell["dtype"] == "float32" and cell["batch"] > 1,
)
