"""A whole step on one GPU and on two, of every drafter and sampling mode, with tensors that have no numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.drafters.contract import Drafter
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.none import PlainDecoding
from drafter.engine.batch_state import BatchState
from drafter.engine.steps.cuda_graphs import StepShape
from drafter.engine.steps.device_step import DeviceStep
from drafter.engine.steps.graph_step import whole_step
from drafter.heads.early_exit.exit_drafter import ExitDrafter
from drafter.heads.registry import new_head
from drafter.requests import SamplingParams
from drafter.stage_times import StageTimes
from drafter.verifiers.choices import SamplingMode
from drafter.verifiers.exact import ExactVerifier
from tests.support.fake_gpus import fake_gpus, move_to_gpus, place_weights
from tests.support.models import random_model

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctc": ("ctc", {"num_heads": 2}),
    "ctc lattice": ("ctc", {"num_heads": 2, "label_context": 2, "joint_size": 8}),
    "ctc, drafts a part": ("ctc", {"num_heads": 2, "label_context": 1, "joint_size": 8, "draft_vocab_size": 40}),
    "ctc linear": ("ctc", {"module": "linear"}),
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {}),
    "hydra++": ("hydra", {"num_heads": 2, "prefix_attention": True}),
}
MODES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.4, logit_bias={5: 1.0}),
}
NODES, ROWS, LENGTH = 7, 4, 48


CASES = [
    *((name, "greedy", 2) for name in ("none", "ngram", "exit", *HEADS)),
    *((name, mode, 1) for name in ("none", "ctc lattice") for mode in MODES),
]


@pytest.mark.parametrize(("name", "mode", "gpus"), CASES)
def test_a_step_waits_for_no_device_and_mixes_none(name: str, mode: str, gpus: int) -> None:
    with mock.patch("drafter.base.causal_lm.prepack"):  # of weights on a CPU
        base = BaseModel(random_model("llama"), native=False)
    head = None
    if name in HEADS:
        algorithm, settings = HEADS[name]
        counts = torch.arange(base.vocab_size) if "draft_vocab_size" in settings else None
        head = new_head(algorithm, base, settings, counts).eval().requires_grad_(False)
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, gpus)
        if head is not None:
            for module in head.modules():
                place_weights(module, base.device)
            drafter: Drafter = head.drafter(base, NODES)
        else:
            others = {"none": PlainDecoding(), "ngram": NgramDrafter(NODES), "exit": ExitDrafter(base, 2, NODES)}
            drafter = others[name]
        state = BatchState(base, drafter, ROWS, LENGTH, StageTimes())
        state.mode = SamplingMode.of([MODES[mode]] * ROWS)
        step = DeviceStep(base, ExactVerifier(), state, packs=False)
        nodes = 0 if name == "none" else NODES
        outcome = whole_step(step, StepShape(ROWS, nodes, 32, state.mode, 1))
        assert outcome.packed.device == base.device == torch.device("cuda", 0)
        assert outcome.packed.shape == (ROWS, 1 if name == "none" else 2 + 2 * (min(drafter.spec.max_depth, nodes) + 1))


def test_what_is_read_of_a_prompt_comes_back_to_one_gpu() -> None:
    with mock.patch("drafter.base.causal_lm.prepack"):
        base = BaseModel(random_model("llama"), native=False)
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 2)
        cache, prompt = base.new_cache(2, 32), torch.zeros(5, dtype=torch.long, device=base.device)
        layers = (0, 2, LM_HEAD_INPUT)
        hidden = base.prefill(cache, 0, [prompt], [0], layers)
        logits, last_hidden = base.prefill_last(cache, 0, prompt, 5, layers)
        assert {hidden.device, logits.device, last_hidden.device} == {base.device}
        assert hidden.shape == last_hidden.shape == (5, 3 * base.hidden_size)
        assert base.lm_head(hidden[:, : base.hidden_size]).device == base.device
