"""Profile: which kinds of kernels a step's time goes to, and how long the device has nothing to do."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from benchmarks.speed import prompts_of
from drafter.devices import synchronise
from drafter.drafters.registry import load_drafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

KINDS: dict[str, str] = {
    "attention": r"attention|flash|fmha|sdpa|softmax_warp|mha_",
    "matmul": r"gemm|gemv|cutlass|cublas|wgmma|nvjet|matmul|linear|addmm|\bmm\b|bmm|splitk",
    "norm": r"norm|rsqrt|welford",
    "sampling": r"argmax|argmin|topk|sort|softmax|gumbel|cumsum|scan|multinomial|radix|logsumexp|arg_?max",
    "copy": r"memcpy|memset|copy|\bcat|catarray|index|gather|scatter|clone|contiguous|fill|embedding|\bto\b|repeat",
}
"""Patterns of names of kernels or operations, tried in this order; the rest is `other`."""
_NODES = 15


def kind_of(name: str) -> str:
    """The kind of kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, lower)), "other")


def cells(plan: Plan) -> list[Key]:
    """Plain decoding and two drafters, for few rows and many."""
    batches = [2] if plan.tiny else [1, 16, 64]
    return [{"drafter": name, "batch": batch} for batch in batches for name in ("none", "ngram", plan.drafter)]


def prepare(plan: Plan) -> Measure:
    """See `Stage`. The model's own code runs: nobody but itself could see into the native decoder."""
    tokenizer = load_tokenizer(plan.model)
    base = BaseModel(load_base(plan.model).model, plan.model, native=False)
    steps = 4 if plan.tiny else 32

    def measure(cell: Key) -> Values:
        batch, name = cell["batch"], cell["drafter"]
        prompts = prompts_of(tokenizer, "short", batch)
        longest = max(map(len, prompts)) + 1 + 8 * steps * (1 + _NODES)
        config = EngineConfig(
            batch, min(longest, base.max_positions or longest), num_draft_tokens=_NODES, max_queue=batch
        )
        engine = Engine(base, load_drafter(name, base, _NODES), tokenizer, config)
        room = config.longest - max(map(len, prompts))
        handles = [engine.submit(Request(ids, SamplingParams(room, ignore_eos=True))) for ids in prompts]
        for _ in range(steps):  # until graphs are recorded
            engine.step()
        found = profiled(engine, steps)
        for handle in handles:
            handle.cancel()
        while not engine.idle:
            engine.step()
        return found

    return measure


def profiled(engine: Engine, steps: int) -> Values:
    """Profile steps of an engine."""
    device = engine.base.device
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    before = engine.state()
    synchronise(device)
    with profile(activities=activities) as seen:
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        synchronise(device)
        seconds = time.perf_counter() - start
    after = engine.state()
    busy, count, dearest = shares(list(seen.key_averages()), on_gpu=on_gpu)
    return {
        "steps": after.steps - before.steps,
        "seconds": seconds,
        "busy": sum(busy.values()),
        "kinds": dict(busy),
        "kernels": count,
        "dearest": dearest,
    }


def shares(events: list[Any], *, on_gpu: bool) -> tuple[Counter[str], int, list[tuple[str, float]]]:
    """Return seconds by kind, the number of kernels (operations on a CPU), and the ten dearest with their seconds.

    Args:
        events: Averages of a profiler by name.
        on_gpu: Whether kernels are counted, rather than the host's operations without those that they call.
    """
    by_kind: Counter[str] = Counter()
    count, single = 0, []
    for event in events:
        is_kernel = event.device_type.name == "CUDA"
        if is_kernel != on_gpu or (not on_gpu and "::" not in event.key):
            continue
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        by_kind[kind_of(event.key)] += seconds
        count += event.count
        single.append((event.key[:80], seconds))
    return by_kind, count, sorted(single, key=lambda one: -one[1])[:10]


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    busy = values["busy"] or 1.0
    kinds = {kind: f"{values['kinds'].get(kind, 0) / busy:.0%}" for kind in (*KINDS, "other")}
    return {
        **cell,
        "ms a step": f"{1e3 * values['seconds'] / values['steps']:.2f}",
        "busy": f"{values['busy'] / values['seconds']:.0%}",
        "kernels a step": f"{values['kernels'] / values['steps']:.0f}",
        **kinds,
    }


STAGE = Stage("profile", "Share of each kind of kernel; on a CPU of PyTorch's operations.", cells, prepare, row)
