"""Plans an engine's device memory before any is taken; too many slots are refused with a number that would fit."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import torch

from drafter import devices
from drafter.drafters.contract import DraftSpec
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError
from drafter.target.attention import query_groups
from drafter.target.model import BaseModel

_LOG = logging.getLogger(__name__)
GPU_CHUNK = 2048  # prompt tokens of one forward on a GPU
_SAMPLING_COPIES = 11
"""Copies of a row's scores in float64, and of integers as large, that the dearest sampling mode makes."""
_HIDDEN_COPIES, _INNER_COPIES = 10, 3
"""Copies of a node's hidden state, and of its state inside an MLP, that a layer makes; some are in fp32."""
_MASKS = 3  # bytes of a mask's bool entries beside those of the mask of numbers
_RECORDED = 4 << 20  # bytes that a recorded step is taken to need of its own: the list of its kernels


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that determine an engine's memory beside the target model's weights."""

    slots: int
    max_length: int  # prompt and output tokens of a sequence
    nodes: int  # draft nodes of a row's tree
    depth: int  # largest depth of a tree
    vocabulary: int
    width: int  # of the hidden states
    inner: int  # width inside the MLP
    groups: int  # query heads that share a KV head
    number: int  # bytes of a number
    kv: int  # bytes of keys and values of a position, in all layers
    layer_kv: int  # the same in the largest layer
    copied_kv: int  # copies of a layer's keys and values that attention makes
    draft_kv: int  # bytes of the drafter's own state of a position
    hidden: int  # bytes of the hidden states that are kept of a position for the drafter
    prompt: int  # prompt tokens of one forward
    in_parts: bool = False  # attention over trees reads committed positions without a mask
    kv_limit: int | None = None  # largest size of the KV cache in bytes
    graphs: int = 0  # recorded steps
    scratch: int = 0  # see `DraftSpec`

    @property
    def length(self) -> int:
        """Positions of a slot; see `slot_length`."""
        return slot_length(self.max_length, max(self.nodes, self.scratch - 1), self.depth)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by item, an upper bound: temporary memory of a step is counted in full."""

    items: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in self.items.items())

    def table(self) -> str:
        """Return one line for each item, and one for the total."""
        rows = {**self.items, "in all": self.total}
        return "\n".join(f"{name:<15} {gib(size):>14}" for name, size in rows.items())


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


def slot_length(max_length: int, nodes: int, depth: int) -> int:
    """Return the positions of a slot for `max_length` tokens, `nodes` draft nodes and the stale ends of a path."""
    # One more than is ever written, for `KVCache.scrub`; a multiple of eight, as a GPU's kernels want masks to be.
    return -(-(max_length + nodes + depth + 2) // 8) * 8


def plan_memory(sizes: EngineSizes) -> MemoryPlan:
    """Return the memory of an engine of these sizes beside the target model's weights."""
    positions, tree = sizes.slots * sizes.length, sizes.slots * (sizes.nodes + 1)
    cache = sizes.kv * positions
    if sizes.kv_limit is not None:
        cache = min(cache, sizes.kv_limit)
    # Prompts are read, and steps are done, one after the other. Prompts have no logits but for their last token.
    forward = max(tree, sizes.prompt) * sizes.number * (_HIDDEN_COPIES * sizes.width + _INNER_COPIES * sizes.inner)
    columns = sizes.nodes + 1 if sizes.in_parts else sizes.length
    masks = max(tree * sizes.groups * columns, sizes.prompt * sizes.length) * (sizes.number + _MASKS)
    # A long prompt's attention repeats its keys and values for each query head, as transformers does it.
    copies = max(sizes.copied_kv * positions, sizes.groups * sizes.length) * sizes.layer_kv
    step = {
        "forward": forward,
        "attention": masks + copies,
        "logits": tree * sizes.vocabulary * sizes.number,
        "sampling": sizes.slots * sizes.vocabulary * 8 * _SAMPLING_COPIES,
    }
    # A graph's memory is apart from that of steps that run as they are; all graphs share theirs.
    graphs = sum(step.values()) + sizes.graphs * _RECORDED if sizes.graphs else 0
    kept = {
        "KV cache": cache,
        "draft's own KV": sizes.draft_kv * positions,
        "hidden states": sizes.hidden * positions,
        "texts": 8 * positions,
    }
    return MemoryPlan({**kept, **step, "graphs": graphs})


def what_would_fit(sizes: EngineSizes, free: int) -> str:
    """Advise on single changes that make sizes fit into `free` bytes."""
    found = []
    for name, setting, low in (
        ("slots", "max_num_seqs", 1),
        ("max_length", "max_model_len", 2),
        ("nodes", "num_draft_tokens", 0),
    ):

        def total(value: int, name: str = name) -> int:
            changed: dict[str, Any] = {name: value}
            return plan_memory(replace(sizes, **changed)).total

        fitting = bisect_right(range(low, getattr(sizes, name) + 1), free, key=total)
        if fitting:
            found.append(f"{setting} to {low + fitting - 1:,}")
    return (
        f"lower {' or '.join(found)}"
        if found
        else "lower max_num_seqs, max_model_len and num_draft_tokens together, or use another GPU"
    )


def engine_sizes(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> EngineSizes:
    """Return the sizes of an engine with the drafter's `spec`, whose target model is ready for decoding."""
    layers, width = base.kv_bytes_per_token, base.hidden_size
    return EngineSizes(
        slots=config.max_num_seqs,
        max_length=max_length,
        nodes=spec.max_nodes,
        depth=spec.max_depth,
        vocabulary=base.vocab_size,
        width=width,
        inner=getattr(base.config, "intermediate_size", None) or 4 * width,
        groups=query_groups(base.config),
        number=base.dtype.itemsize,
        kv=sum(layers),
        layer_kv=max(layers),
        copied_kv=max(base.copies_of_kv, int(config.kv_bytes is not None)),
        draft_kv=spec.bytes_per_token,
        hidden=len(spec.hidden_layers) * width * base.dtype.itemsize,
        prompt=min(GPU_CHUNK, config.max_num_seqs * max_length),
        in_parts=base.reads_to_length and config.kv_bytes is None,
        kv_limit=config.kv_bytes,
        graphs=graphs,
        scratch=spec.scratch,
    )


def plan_or_refuse(device: torch.device, sizes: EngineSizes) -> MemoryPlan:
    """Plan an engine's memory, and log the plan; raise `LoadError` if the device has less left."""
    plan, free = plan_memory(sizes), devices.free_bytes(device)
    _LOG.info(
        "memory beside the model, of %s left on %s:\n%s", "?" if free is None else gib(free), device, plan.table()
    )
    if free is not None and plan.total > free:
        raise LoadError(
            f"an engine of {sizes.slots:,} slots takes {gib(plan.total)} beside the model, and {device} has "
            f"{gib(free)} left: {what_would_fit(sizes, free)} (it takes {plan})"
        )
    return plan
