"""Whole steps of any size on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import LlamaConfig

from benchmarks.gpu.operation_counts import OperationCounts
from drafter.acceptance.contract import ExactVerifier, Verifier
from drafter.acceptance.guide import Guide
from drafter.acceptance.limits import Limits
from drafter.drafters.contract import Ask, Drafter
from drafter.engine.batch import BatchState
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import DeviceStep, StepTensors
from drafter.parts.guide import GuidePart
from drafter.parts.steering import masks, steered
from drafter.requests import SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, root_only
from tests.support.fake_gpus import fake, place_weights
from tests.support.models import EOS, SpellingTokenizer

LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=131_072,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=131_072,
)


_GREEDY = SamplingParams()


@dataclass(frozen=True)
class FakeStep:
    """A step of `rows` rows over `kv_length` positions, on fake GPUs; made and run within `fake_gpus`.

    Args:
        base: On them.
        drafter: For it.
        rows: Rows, which are all slots.
        nodes: Draft nodes of each row.
        kv_length: Positions that attention reads, the nodes' included.
        sampling: Of all rows.
        other: Of every second row, where rows differ.
        verifier: Decides what is accepted.
        guide: Of all rows; their trees are then what it forces.
        queued: Between its stages everything is in buffers, for longer texts and more positions than are asked for.
    """

    base: BaseModel
    drafter: Drafter
    rows: int
    nodes: int
    kv_length: int
    sampling: SamplingParams = _GREEDY
    other: SamplingParams | None = None
    verifier: Verifier = field(default_factory=ExactVerifier)
    guide: Guide | None = None
    queued: bool = False

    def run(self) -> StepTensors:
        """Make a state and do the step."""
        return self.prepared()()

    def counted(self) -> OperationCounts:
        """Do the step, and count what it does; what the state takes is not counted."""
        step = self.prepared()
        counts = OperationCounts()
        with counts:
            step()
        return counts

    def prepared(self) -> Callable[[], StepTensors]:
        state = BatchState(self.base, self.drafter, self.rows, self.kv_length, StageTimes())
        both = [self.sampling, self.other or self.sampling]
        some = [both[row % 2] for row in range(self.rows)]
        for slot, one in enumerate(some[:2]):
            limits = Limits.of(one, [EOS], SpellingTokenizer())
            state.sampling.set(slot, one, 1, limits, self.base.vocab_size)
        state.expect(some)
        step = DeviceStep(self.base, self.verifier, state, packs=False)
        if self.guide is not None:
            return self._guided(step, self.guide)
        longest = self.kv_length - self.nodes - 1
        if self.queued:
            return partial(QueuedStep(step, None).whole, self.rows, self.nodes, longest)

        def run() -> StepTensors:
            tree = step.draft(state.bounded_context(self.rows, longest), Ask(self.nodes))
            return step.finish(step.verify(tree, self.kv_length), slice(0, self.rows))

        return run

    def _guided(self, step: DeviceStep, guide: Guide) -> Callable[[], StepTensors]:
        """Return a step that the host follows: it has made trees and masks, and the step begins as they are sent."""
        parts, depth = [GuidePart(guide)] * self.rows, self.drafter.spec.max_depth
        with unset_fake_temporarily():  # the host reads numbers
            bare = root_only(torch.zeros(self.rows, dtype=torch.long))
            tree, _ = steered(bare, parts, 0, self.nodes, depth)
            allowed = masks(tree, parts, self.base.vocab_size)
            assert allowed is not None
        tree = TokenTree(*(fake(part, self.base.device) for part in vars(tree).values()))
        allowed = fake(allowed, self.base.device)
        context = step.state.bounded_context(self.rows, self.kv_length - self.nodes - 1)

        def run() -> StepTensors:
            verified = step.verify(tree, context.longest + tree.size)
            return step.finish(replace(verified, allowed=allowed), slice(0, self.rows))

        return run


def on_gpu(module: nn.Module, device: torch.device) -> None:
    """Replace all weights of a draft head by fakes."""
    for part in module.modules():
        place_weights(part, device)
