"""Whether an engine fits into its device's memory: planned before any is taken, tried before the first request."""

from __future__ import annotations

import logging

import torch

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.base.tree_attention import query_groups
from drafter.drafters.contract import DraftSpec
from drafter.engine.engine_config import EngineConfig
from drafter.engine.memory_plan import EngineSizes, MemoryPlan, gib, plan_memory, what_would_fit
from drafter.engine.sequences.admission import GPU_CHUNK
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.graph_step import step_shape, whole_step
from drafter.errors import LoadError
from drafter.verifiers.choices import SamplingMode

_LOG = logging.getLogger(__name__)
_DEAREST = SamplingMode(biased=True, penalties=True, random=True, mixed=True, ranked=True, nucleus=True, floored=True)
"""All that sampling may have to do, in one batch."""


def engine_sizes(base: BaseModel, spec: DraftSpec, config: EngineConfig, max_length: int, graphs: int) -> EngineSizes:
    """The sizes of an engine; see there.

    Args:
        base: The base, ready for decoding.
        spec: The drafter's.
        config: The engine's.
        max_length: Prompt and output tokens of a sequence.
        graphs: Steps that are recorded at most.
    """
    layers, width = base.kv_bytes_per_token, base.hidden_size
    return EngineSizes(
        slots=config.slots,
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
        prompt=min(GPU_CHUNK, config.slots * max_length),
        in_parts=base.reads_to_length and config.kv_bytes is None,
        kv_limit=config.kv_bytes,
        graphs=graphs,
        scratch=spec.scratch,
    )


def plan_or_refuse(device: torch.device, sizes: EngineSizes) -> MemoryPlan:
    """Plan an engine's memory, and note the plan in the log.

    Raises:
        LoadError: The device has less memory left; the message says what takes how much, and what would fit.
    """
    plan, free = plan_memory(sizes), devices.free_bytes(device)
    _LOG.info("memory beside the base, of %s left on %s:\n%s", "?" if free is None else gib(free), device, plan.table())
    if free is not None and plan.total > free:
        raise LoadError(
            f"an engine of {sizes.slots:,} slots takes {gib(plan.total)} beside the base, and {device} has {gib(free)} "
            f"left: {what_would_fit(sizes, free)} (it takes {plan})"
        )
    return plan


@torch.inference_mode()
def try_dearest_step(step: DeviceStep, plan: MemoryPlan) -> None:
    """Do the step that takes most memory: all slots at full length, the largest trees, and all that sampling may do.

    Args:
        step: The stages; all slots are empty, and are so again.
        plan: What was thought that it takes.

    Raises:
        LoadError: It does not fit.
    """
    state, nodes = step.state, step.state.drafter.spec.max_nodes
    mode, state.mode = state.mode, _DEAREST
    try:
        state.lengths.fill_(0)
        if nodes:
            state.drafter.prepare(state.context([0] * state.slots))
        whole_step(step, step_shape(step, state.slots, nodes, state.max_length))
        devices.synchronise(step.base.device)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"a step of {state.slots:,} slots that samples with every setting does not fit beside {step.base.name}: "
            f"lower slots, max_length or nodes (planned: {plan})"
        ) from error
    finally:
        state.mode = mode
    state.forget()
