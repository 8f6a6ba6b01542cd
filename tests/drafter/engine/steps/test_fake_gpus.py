"""Whole steps on one GPU and on two, of every drafter and sampling mode, with tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from drafter.base.hidden_states import LM_HEAD_INPUT
from drafter.drafters.contract import Drafter, Renewal
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.ngram import NgramDrafter
from drafter.drafters.registry import TRAINING_FREE
from drafter.heads.early_exit.exit_drafter import ExitDrafter
from drafter.learning.changing_head import ChangingHead
from drafter.learning.starting_head import StartingHead
from drafter.requests import SamplingParams
from tests.support.fake_gpus import fake_gpus, move_to_gpus
from tests.support.fake_steps import FakeStep, on_gpu
from tests.support.heads import KINDS, STATIC, make_head
from tests.support.marks import slow_but
from tests.support.models import random_model
from tests.support.tapes import Tape

MODES: dict[str, tuple[SamplingParams, SamplingParams | None]] = {
    "greedy": (SamplingParams(), None),
    "sampled": (SamplingParams(temperature=0.7), None),
    "top-k and top-p": (SamplingParams(temperature=0.7, top_p=0.9, top_k=20), None),
    "min-p": (SamplingParams(temperature=0.7, min_p=0.01), None),
    "mixed": (SamplingParams(temperature=0.7, top_p=0.9), SamplingParams()),
    "penalised": (SamplingParams(repetition_penalty=1.1, presence_penalty=0.4), None),
    "biased": (SamplingParams(logit_bias={5: 1.0}), None),
    "everything": (
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, frequency_penalty=0.3, logit_bias={5: 1.0}),
        SamplingParams(),
    ),
}
NODES, ROWS, LENGTH = 7, 4, 48


def _head(kind: str, base: BaseModel, tree: str = "exact") -> Callable[[], Drafter]:
    head = make_head(base, kind)

    def make() -> Drafter:
        on_gpu(head, base.device)
        return head.drafter(base, NODES, tree)  # type: ignore[arg-type]

    return make


def _merged(base: BaseModel) -> Callable[[], Drafter]:
    head = _head("context 2", base)
    return lambda: MergedDrafter(head(), NgramDrafter(NODES))


DRAFTERS: dict[str, Callable[[BaseModel], Callable[[], Drafter]]] = {
    **{name: lambda base, make=make: partial(make, NODES) for name, make in TRAINING_FREE.items()},  # type: ignore[misc]
    **{kind: partial(_head, kind) for kind in KINDS},
    **{f"{kind}, static": partial(_head, kind, tree="static") for kind in STATIC},
    "context 2 + ngram": _merged,
    "exit": lambda base: lambda: ExitDrafter(base, 2, NODES),
}
"""Makes of a base, before it is on the GPUs, what makes a drafter there."""
CASES = [(name, mode, 1) for name in DRAFTERS for mode in MODES] + [(name, "greedy", 2) for name in DRAFTERS]
FAST = [
    *((name, "greedy", 2) for name in ("none", "ngram", "memory", "ctc", "context 2, in part", "medusa", "hydra++")),
    *((name, "greedy", 1) for name in ("cacheback", "ctc, static", "context 2 + ngram")),
    *(("none", mode, 1) for mode in MODES),
    ("context 2", "everything", 1),
]


def _llama() -> BaseModel:
    with mock.patch("drafter.base.causal_lm.prepack"):
        return BaseModel(random_model("llama"), native=False)


@pytest.mark.parametrize("case", slow_but(FAST, CASES), ids=lambda case: f"{case[0]}, {case[1]}, {case[2]}")
def test_a_step_waits_for_no_device_and_mixes_none(case: tuple[str, str, int]) -> None:
    name, mode, gpus = case
    base = _llama()
    make = DRAFTERS[name](base)
    sampling, other = MODES[mode]
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, gpus)
        drafter = make()
        nodes = min(NODES, drafter.spec.max_nodes)
        step = FakeStep(base, drafter, ROWS, nodes, LENGTH, sampling, other).prepared()
        if name.endswith("static"):
            step()  # sends its fixed tree, once; the first step of a shape is never recorded
        with Tape() if drafter.spec.graph_safe else nullcontext():
            outcome = step()
        assert outcome.packed.device == base.device == torch.device("cuda", 0)
        assert outcome.packed.shape == (ROWS, 2 + 2 * (min(drafter.spec.max_depth, nodes) + 1) if nodes else 1)


def test_a_head_changes_on_a_gpu_without_waiting_and_is_recorded_before() -> None:
    base = _llama()
    head = make_head(base, "context 2")
    with fake_gpus(), torch.inference_mode(), mock.patch.object(StartingHead, "load", return_value=head):
        move_to_gpus(base, 1)
        on_gpu(head, base.device)
        changing = ChangingHead(StartingHead(), base, NODES)
        step = FakeStep(base, MergedDrafter(changing, NgramDrafter(NODES)), ROWS, NODES, LENGTH).prepared()
        with Tape():
            step()
        weights = {name: torch.empty(tensor.shape) for name, tensor in head.state_dict().items()}
        # Fakes have no numbers that could be checked, and are the thread's that made them.
        room = "drafter.learning.changing_head"
        with mock.patch(f"{room}.check_weights"), mock.patch(f"{room}.in_passing_thread", lambda work: work()):
            changing.offer(1, weights)
        assert changing.renew() == Renewal(1)
        with Tape():
            outcome = step()
        assert outcome.packed.device == base.device


def test_what_is_read_of_a_prompt_comes_back_to_one_gpu() -> None:
    base = _llama()
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 2)
        cache, prompt = base.new_cache(2, 32), torch.zeros(5, dtype=torch.long, device=base.device)
        layers = (0, 2, LM_HEAD_INPUT)
        hidden = base.prefill(cache, 0, [prompt], [0], layers)
        logits, last_hidden = base.prefill_last(cache, 0, prompt, 5, layers)
        assert {hidden.device, logits.device, last_hidden.device} == {base.device}
        assert hidden.shape == last_hidden.shape == (5, 3 * base.hidden_size)
        assert base.lm_head(hidden[:, : base.hidden_size]).device == base.device
