"""Plans an engine's device memory, item by item, before any of it is taken.

Too many slots for a GPU's memory are refused at start, with a number that would fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_SAMPLING_COPIES = 11
"""Copies of a row's scores in float64, and of integers as large, that the dearest sampling mode has at a time."""
_HIDDEN_COPIES, _INNER_COPIES = 10, 3
"""Copies of a node's hidden state, and of its state inside an MLP, that a layer has at a time; some are in fp32."""
_MASKS = 3
"""Bytes of a mask's bool entries beside those of the mask of numbers."""
_RECORDED = 4 << 20
"""Bytes that a recorded step is taken to need of its own: the list of its kernels."""


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that determine an engine's memory beside the target model's weights.

    Args:
        slots: Sequences decoded together.
        max_length: Prompt and output tokens of a sequence.
        nodes: Draft nodes of a row's tree.
        depth: Draft nodes on a way down a tree at most.
        vocabulary: Size of the base's.
        width: Of the base's hidden states.
        inner: Of the base's MLP.
        groups: Query heads that share a KV head.
        number: Bytes of a number of the base's dtype.
        kv: Bytes of the base's keys and values of a position, in all layers.
        layer_kv: The same in the largest layer.
        copied_kv: How many copies of a layer's keys and values attention makes of the rows: none where it reads them
            where they are.
        draft_kv: Bytes of what the drafter itself keeps of a position.
        hidden: Bytes of the base's hidden states that are kept of a position for the drafter.
        prompt: Tokens of prompts that are read in one forward at most.
        in_parts: Whether attention over trees reads what is committed without a mask; see `prefix_attention`.
        kv_limit: Bytes that the KV cache may take; None for as many as all slots of full length take.
        graphs: Steps that are recorded at most; 0 where none are.
        scratch: Positions behind the committed ones that the drafter writes at most.
    """

    slots: int
    max_length: int
    nodes: int
    depth: int
    vocabulary: int
    width: int
    inner: int
    groups: int
    number: int
    kv: int
    layer_kv: int
    copied_kv: int
    draft_kv: int
    hidden: int
    prompt: int
    in_parts: bool = False
    kv_limit: int | None = None
    graphs: int = 0
    scratch: int = 0

    @property
    def length(self) -> int:
        """Positions of a slot; see `slot_length`."""
        return slot_length(self.max_length, max(self.nodes, self.scratch - 1), self.depth)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by item. What a step needs only while it is done is counted in full, so it is rather too much.

    Args:
        items: Name → bytes.
    """

    items: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(self.items.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in self.items.items())

    def table(self) -> str:
        """The items below one another, the total last."""
        rows = {**self.items, "in all": self.total}
        return "\n".join(f"{name:<15} {gib(size):>14}" for name, size in rows.items())


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.2f} GiB"


def slot_length(max_length: int, nodes: int, depth: int) -> int:
    """Positions of a slot for `max_length` tokens, `nodes` draft nodes and the stale ends of a path of `depth` nodes.

    That is one position more than is ever written, for `KVCache.scrub`, and a multiple of eight, as a GPU's kernels
    want masks to be.
    """
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

        def fits(value: int, name: str = name) -> bool:
            changed: dict[str, Any] = {name: value}
            return plan_memory(replace(sizes, **changed)).total <= free

        value = _largest(fits, low, getattr(sizes, name))
        if value is not None:
            found.append(f"{setting} to {value:,}")
    return (
        f"lower {' or '.join(found)}"
        if found
        else "lower max_num_seqs, max_model_len and num_draft_tokens together, or use another GPU"
    )


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, where all smaller ones fit too; None if none does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
