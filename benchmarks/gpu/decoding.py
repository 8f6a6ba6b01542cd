"""Speed of decoding with the real model and its drafter, beside `transformers.generate`; see `benchmarks.speed`."""

from __future__ import annotations

from benchmarks import speed
from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer

_WAYS = [way for way in speed.WAYS if "continuous" not in way]


def cells(plan: Plan) -> list[Key]:
    """All ways at all batch sizes, those at one size next to each other."""
    batches, ways = ([1, 2], [speed.PLAIN, "drafter", speed.GENERATE]) if plan.tiny else (speed.BATCHES, _WAYS)
    contexts = ("short",) if plan.tiny else ("short", "long")
    return [
        {"batch": batch, "context": context, "way": way}
        for batch in batches
        for context in contexts
        for way in ways
        if batch == 1 or "prompt lookup" not in way
    ]


def prepare(plan: Plan) -> Measure:
    """See `Stage`. A base that has been compiled stays so: each way that compiles has one of its own."""
    tokenizer, plain = load_tokenizer(plan.model), load_base(plan.model)
    tokens, least = (8, 2) if plan.tiny else (128, 8)

    def measure(cell: Key) -> Values:
        batch, way = cell["batch"], cell["way"]
        base = load_base(plan.model) if "compiled" in way else plain
        prompts = speed.prompts_of(tokenizer, cell["context"], max(batch, least))
        decode = speed.WAYS[way](base, tokenizer, plan.drafter, batch, max(map(len, prompts)) + tokens)
        requests = [Request(ids, SamplingParams(tokens)) for ids in prompts]
        decode(requests)  # some work is done when it is first needed
        done = decode(requests)
        beta = mean_acceptance_length(total(done.counts)) if done.counts else None
        return {"tokens": done.num_tokens, "seconds": done.seconds, "beta": beta}

    return measure


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    beta = "" if values["beta"] is None else f"{values['beta']:.2f}"
    return {**cell, "tokens/s": f"{values['tokens'] / values['seconds']:.0f}", "β": beta}


STAGE = Stage("speed", "Greedy decoding of GSM8K's questions, prefills included.", cells, prepare, row)
