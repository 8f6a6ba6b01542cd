"""The optimiser step under DeepSpeed, whose ZeRO stage partitions target model and head among workers.

Weights stay in fp32; bf16 comes from autocast. So a checkpoint is the head's whole weights and AdamW's two moments, the
same for every ZeRO stage and every number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import deepspeed.ops
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from torch import Tensor, distributed, nn

from drafter.heads.checkpoint import HEADS
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch
from drafter.training.loop import TrainingStep, Update, adamw, check_finite
from drafter.training.settings import TrainingSettings
from pipeline.training.config import ShardingConfig
from pipeline.training.folder import MOMENTS, SavedRun

T = TypeVar("T")
# Of DeepSpeed's extensions only that for sums in shared memory is found on a CPU. The first job would compile it, for
# inference that we do not use, and one that is killed meanwhile leaves a lock at which all later ones wait for ever.
deepspeed.ops.__compatible_ops__ = {}


class _Root(nn.Module):
    """Runs any function inside its forward, where ZeRO-3 gathers weights on demand."""

    def __init__(self, step_of: TrainingStep) -> None:
        super().__init__()
        self.step_of = step_of

    def forward(self, work: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        return work(*arguments)


class ShardedOptimiser:
    """`Optimiser` for a process group; all workers call every method. The head has the weights of `state` already."""

    def __init__(
        self,
        step_of: TrainingStep,
        settings: TrainingSettings,
        sharding: ShardingConfig,
        state: SavedRun | None = None,
    ) -> None:
        self.steps = state.steps if state else 0
        self._pending = state
        self._step_of, self._settings, self._stage = step_of, settings, sharding.zero_stage
        self._adamw = adamw(step_of.head, settings)
        self._parameters = dict(step_of.head.named_parameters())
        self._engine = deepspeed.initialize(
            model=_Root(step_of),
            model_parameters=list(self._parameters.values()),
            optimizer=self._adamw,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": sharding.micro_batches,
                "gradient_clipping": settings.clip,
                "zero_optimization": {"stage": sharding.zero_stage},
                "steps_per_print": 10**12,
            },
        )[0]

    def run(self, work: Callable[[], T]) -> T:
        """Run a function that reads weights."""
        (result,) = self._engine(lambda: (work(),))
        return result  # type: ignore[no-any-return]

    def update(self, parts: Sequence[DraftBatch]) -> Update:
        """Take a step; see `Optimiser.update`. After a gradient that is not finite, the weights are lost."""
        if self._pending is not None:
            self._restore(self._pending, parts[0])
            self._pending = None
        rate = self._settings.learning_rate_at(self.steps)
        losses = []
        for part in parts:
            total, weight = self._engine(self._step_of, part)
            sums = torch.stack([total.detach(), weight.detach()]).double()
            distributed.all_reduce(sums)
            losses.append((sums[0] / sums[1].clamp_min(1e-9)).item())
            if not math.isfinite(losses[-1]):
                check_finite(self.steps + 1, losses[-1], math.nan)
            # The weighted mean of all workers, times their number: the engine divides by that again.
            self._engine.backward(total * (distributed.get_world_size() / sums[1].clamp_min(1e-9)).float())
            norm = self._step(rate)
        loss = sum(losses) / len(losses)
        check_finite(self.steps + 1, loss, norm)
        self.steps += 1
        return Update(loss, norm, rate)

    def _step(self, rate: float) -> float:
        """Let the engine count a micro-batch and step at the last one. Return the gradient norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if self._stage == 0 and self._engine.is_gradient_accumulation_boundary():
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return float(norm) if norm is not None else 0.0

    def weights(self) -> dict[str, Tensor]:
        """Gather the head's tensors by name, in float32. All workers take part."""
        buffers = self._step_of.head.state_dict().keys() - self._parameters.keys()
        weights = {name: self._whole(parameter) for name, parameter in self._parameters.items()}
        return weights | {name: self._step_of.head.get_buffer(name).to("cpu", copy=True) for name in sorted(buffers)}

    def state(self) -> SavedRun:
        """Gather the whole state, which is whole after the first step. All workers take part."""
        moments = {key: {name: self._whole(p, key) for name, p in self._parameters.items()} for key in MOMENTS}
        return SavedRun(self.steps, self.weights(), moments)

    def _whole(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        if self._stage == 0:
            found = parameter if moment is None else self._adamw.state[parameter][moment]
        elif moment is None:
            found = safe_get_full_fp32_param(parameter)
        else:
            found = safe_get_full_optimizer_state(parameter, moment)
        return found.detach().to("cpu", copy=True).view(getattr(parameter, "ds_shape", parameter.shape))

    def _restore(self, state: SavedRun, batch: DraftBatch) -> None:
        """Set AdamW's moments. They exist only after a step, so a step that changes nothing is taken first."""
        for _ in range(self._engine.gradient_accumulation_steps()):
            total, _ = self._engine(self._step_of, batch)
            self._engine.backward(total * 0.0)
            self._step(rate=0.0)
        for moment, values in state.moments.items():
            for name, parameter in self._parameters.items():
                self._set_moment(parameter, moment, values[name].to(parameter.device))
        for known in self._adamw.state.values():
            known["step"].fill_(state.steps)

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if self._stage == 0:
            self._adamw.state[parameter][moment].copy_(value)
        elif self._stage < 3:
            safe_set_full_optimizer_state(parameter, value, moment)
        else:
            # All workers hold equal parts, so the last one is padded.
            size = parameter.partition_numel()  # type: ignore[attr-defined]
            mine = value.flatten()[size * distributed.get_rank() :][:size]
            safe_set_local_optimizer_state(parameter, nn.functional.pad(mine, (0, size - len(mine))), moment)


def head_of(head: DraftHead, weights: dict[str, Tensor]) -> DraftHead:
    """Return a head on the CPU like `head`, which may be partitioned, with `weights`."""
    whole = HEADS[head.algorithm](head.config)
    whole.load_state_dict(weights)
    whole.provenance = head.provenance
    return whole
