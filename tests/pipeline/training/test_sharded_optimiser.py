"""DeepSpeed's step on two processes equals the plain step on one, for every ZeRO stage and from any checkpoint."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed.comm import comm
from torch import distributed
from torch.multiprocessing.spawn import spawn

from drafter.heads.checkpoint import new_head
from drafter.heads.losses import DraftBatch
from drafter.target_model.model import BaseModel
from drafter.training.loop import Optimiser, TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, anchor_draws, draft_batch, simulated_beta
from pipeline.cluster.ray_cluster import free_ports
from pipeline.training.config import ShardingConfig
from pipeline.training.folder import read_checkpoint, write_checkpoint
from pipeline.training.sharded_optimiser import ShardedOptimiser, head_of
from pipeline.training.steps import share
from tests.support.models import random_model

pytestmark = pytest.mark.slow
STEPS, STOP = 5, 3
SETTINGS = TrainingSettings(steps=STEPS, anchors_per_text=6, learning_rate=1e-2, warmup_steps=2, clip=0.5)
HEAD = {"num_frames": 5, "depth": 3, "num_heads": 2, "intermediate_size": 48}
SHARDINGS = [ShardingConfig(0), ShardingConfig(2), ShardingConfig(3), ShardingConfig(0, 2), ShardingConfig(3, 2)]
Curve = list[list[float]]
"""Loss and gradient norm of each step."""


def new_step(base: BaseModel) -> TrainingStep:
    torch.manual_seed(0)
    return TrainingStep(base, new_head("ctc", base, HEAD), SETTINGS)


def parts(step: int, micro_batches: int, rank: int, workers: int) -> list[DraftBatch]:
    """A worker's micro-batches of a step."""
    rng = torch.Generator().manual_seed(step)
    texts = [RegeneratedText(torch.randint(3, 97, (12 + i,), generator=rng).tolist(), 3) for i in range(5)]
    return [
        draft_batch([texts[place] for place in places], 3, 6, anchor_draws(0, step, places))
        for places in share(5, micro_batches, rank, workers)
    ]


def curve(optimiser: Optimiser, first: int, stop: int, micro_batches: int, rank: int = 0, workers: int = 1) -> Curve:
    """Losses of the steps `first … stop - 1`."""
    updates = [optimiser.update(parts(step, micro_batches, rank, workers)) for step in range(first, stop)]
    return [[update.loss, update.gradient_norm] for update in updates]


def _worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    held_out = [RegeneratedText(list(range(3, 40)), 3)]
    found = []
    for sharding in SHARDINGS:
        micro = sharding.micro_batches
        optimiser = ShardedOptimiser(new_step(BaseModel(random_model("llama"))), SETTINGS, sharding)
        assert comm.cdb.shm_comm_op is None  # nothing was compiled for it
        unbroken = curve(optimiser, 0, STOP, micro, rank, 2)
        saved = Path(folder) / f"{sharding.zero_stage}-{micro}-{rank}"
        saved.mkdir()
        write_checkpoint(optimiser.state(), saved)
        unbroken += curve(optimiser, STOP, STEPS, micro, rank, 2)

        # Goes on in another stage than it was saved in.
        state = read_checkpoint(saved)
        base = BaseModel(random_model("llama"))
        step_of = new_step(base)
        step_of.head.load_state_dict(state.weights)
        another = ShardingConfig((sharding.zero_stage + 1) % 4, micro)  # type: ignore[arg-type]
        resumed = ShardedOptimiser(step_of, SETTINGS, another, state)
        assert resumed.steps == STOP
        found.append([unbroken, curve(resumed, STOP, STEPS, micro, rank, 2)])

        # Weights that are shared out can be read all the same, and together they are a head.
        beta = resumed.run(partial(simulated_beta, step_of.head, base, held_out))
        head = head_of(step_of.head, resumed.state().weights)
        assert beta == simulated_beta(head, BaseModel(random_model("llama")), held_out)
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Curve]]:
    """For each sharding: an unbroken run, and the steps after a stop."""
    folder = tmp_path_factory.mktemp("sharded")
    (port,) = free_ports(1)
    spawn(_worker, (port, str(folder)), nprocs=2)
    ranks: list[list[list[Curve]]] = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    return ranks[0]


@pytest.mark.parametrize("index", range(len(SHARDINGS)))
def test_every_stage_on_two_workers_is_the_plain_step_on_one(
    found: list[list[Curve]], tiny_base: BaseModel, index: int
) -> None:
    plain = TorchOptimiser(new_step(tiny_base), SETTINGS)
    expected = curve(plain, 0, STEPS, SHARDINGS[index].micro_batches)
    unbroken, resumed = found[index]
    torch.testing.assert_close(torch.tensor(unbroken), torch.tensor(expected), rtol=2e-4, atol=0)
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(unbroken[STOP:]), rtol=1e-5, atol=0)
