"""Plans an engine's device memory before any is taken; too many slots are refused with a number that would fit."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, replace

from drafter import devices
from drafter.drafters.contract import DraftSpec
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError
from drafter.target_model.attention import query_groups
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import KEPT_BYTES

_LOG = logging.getLogger(__name__)
GPU_CHUNK = 2048  # prompt tokens of one forward on a GPU
_SAMPLING_COPIES = 11
"""Copies of a row's scores in float64, and of integers as large, that the most expensive sampling mode makes."""
_HIDDEN_COPIES, _INNER_COPIES = 10, 3
"""Copies of a node's hidden state, and of its state inside an MLP, that a layer makes; some are in fp32."""
_MASKS = 3  # bytes of a mask's bool entries beside those of the mask of numbers
_KEPT_ROWS = 16  # ended rows that are kept where no setting says how many
_RECORDED = 4 << 20  # bytes that the three parts of a recorded step are taken to need: the lists of their kernels


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
    # One more than is ever written, for `TargetCache.scrub`; a multiple of eight, as a GPU's kernels want masks to be.
    return -(-(max_length + nodes + depth + 2) // 8) * 8


def plan_memory(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> MemoryPlan:
    """Return the memory of an engine beside the weights of its target model, which is ready for decoding.

    Args:
        max_length: Prompt and output tokens of a sequence.
        graphs: Number of recorded parts of steps.
    """
    slots, nodes, width, number = config.max_num_seqs, spec.max_nodes, base.hidden_size, base.dtype.itemsize
    in_all = slots + (config.kept_rows or 0)
    length = slot_length(max_length, spec.positions - 1, spec.max_depth)
    positions, tree, prompt = in_all * length, slots * (nodes + 1), min(GPU_CHUNK, slots * max_length)
    kept_bytes, groups = base.cache_bytes, query_groups(base.config)
    inner = getattr(base.config, "intermediate_size", None) or 4 * width
    inner = inner if isinstance(inner, int) else max(inner)  # some families have a size for each layer
    by_position, copied = kept_bytes.position * positions, base.copies_of_kv
    in_parts = base.reads_to_length  # attention over trees reads committed positions without a mask
    if config.kv_bytes is not None:
        by_position, copied, in_parts = min(by_position, config.kv_bytes), max(copied, 1), False
    # Prompts are read, and steps are done, one after the other. Prompts have no logits but for their last token.
    forward = max(tree, prompt) * number * (_HIDDEN_COPIES * width + _INNER_COPIES * inner)
    masks = max(tree * groups * (nodes + 1 if in_parts else length), prompt * length) * (number + _MASKS)
    # A long prompt's attention repeats its keys and values for each query head, as transformers does it.
    copies = max(copied * slots * length, groups * length) * max(base.kv_bytes_per_token)
    step = {
        "forward": forward,
        "attention": masks + copies,
        "logits": tree * base.vocab_size * number,
        "sampling": slots * base.vocab_size * 8 * _SAMPLING_COPIES,
    }
    in_step = kept_bytes.node * tree + kept_bytes.row * slots
    kept = {
        "KV cache": by_position + kept_bytes.slot * in_all + kept_bytes.once + in_step,
        "draft's own KV": spec.bytes_per_token * positions,
        "hidden states": len(spec.hidden_layers) * width * number * positions,
        "texts": 8 * positions,
    }
    if base.sight is not None:  # one prompt at a time is looked at
        kept["images"] = KEPT_BYTES + base.sight.bytes_per_token * max_length
    # A graph's memory is apart from that of steps that run as they are; all graphs share theirs. Between the parts of a
    # step are buffers of logits, bits of masks, hidden states, recurrent states, and the numbers of a tree.
    held = in_step + step["logits"] + tree * (base.vocab_size // 8 + len(spec.hidden_layers) * width * number + 32)
    graphs_bytes = sum(step.values()) + graphs * _RECORDED // 3 + held if graphs else 0
    return MemoryPlan({**kept, **step, "graphs": graphs_bytes})


def what_would_fit(
    base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int, free: int
) -> str:
    """Advise on single changes that make an engine fit into `free` bytes; see `plan_memory`."""

    def total(
        slots: int = config.max_num_seqs,
        length: int = max_length,
        nodes: int = spec.max_nodes,
        kept: int = config.kept_rows or 0,
    ) -> int:
        changed = replace(config, max_num_seqs=slots, kept_rows=kept)
        return plan_memory(base, replace(spec, max_nodes=nodes), changed, length, graphs).total

    found = []
    for setting, low, most, total_of in (
        ("max_num_seqs", 1, config.max_num_seqs, lambda value: total(slots=value)),
        ("max_model_len", 2, max_length, lambda value: total(length=value)),
        ("num_draft_tokens", 0, spec.max_nodes, lambda value: total(nodes=value)),
        ("kept_rows", 0, config.kept_rows or 0, lambda value: total(kept=value)),
    ):
        fitting = bisect_right(range(low, most + 1), free, key=total_of)
        if fitting and most:
            found.append(f"{setting} to {low + fitting - 1:,}")
    if found:
        return f"lower {' or '.join(found)}"
    return "lower max_num_seqs, max_model_len and num_draft_tokens together, or use another GPU"


def rows_to_keep(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> int:
    """Return how many ended rows to keep: where `config` does not say it, as many as half of the rest of memory holds.

    They get none of `kv_gib` that all sequences of full length may need, but blocks that nobody needs. See
    `plan_memory`.
    """
    if config.kept_rows is not None or len(base.devices) > 1:
        return config.kept_rows or 0
    free, size = devices.free_bytes(base.device), slot_length(max_length, spec.positions - 1, spec.max_depth)
    of_row = base.cache_bytes.position * size + base.cache_bytes.slot
    none, one = (
        plan_memory(base, spec, replace(config, kept_rows=kept, kv_gib=None), max_length, graphs) for kept in (0, 1)
    )
    most = max(_KEPT_ROWS, config.max_num_seqs) if devices.is_asynchronous(base.device) else _KEPT_ROWS
    if config.kv_bytes is not None:
        beside = config.kv_bytes - config.max_num_seqs * of_row - base.cache_bytes.once
        if beside < 0:  # rows take blocks as they grow
            return 0 if base.cache_bytes.slot else most
        most = min(most, beside // of_row)
    return most if free is None else max(0, min(most, (free - none.total) // (2 * (one.total - none.total))))


def plan_or_refuse(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> MemoryPlan:
    """Plan an engine's memory, and log the plan; raise `LoadError` if the device has less left. See `plan_memory`."""
    device = base.device
    plan, free = plan_memory(base, spec, config, max_length, graphs), devices.free_bytes(device)
    left, ranks = "?" if free is None else gib(free), config.tensor_parallel_size
    where = str(device) if ranks == 1 else f"{device}, the first of {ranks}, each with its share of the KV cache"
    _LOG.info("memory beside the model, of %s left on %s:\n%s", left, where, plan.table())
    if free is not None and plan.total > free:
        raise LoadError(
            f"an engine of {config.max_num_seqs:,} slots takes {gib(plan.total)} beside the model, and {device} has "
            f"{left} left: {what_would_fit(base, spec, config, max_length, graphs, free)} (it takes {plan})"
        )
    return plan
