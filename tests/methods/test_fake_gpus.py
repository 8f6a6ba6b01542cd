"""Whole steps on one GPU and on two, of every drafter and sampling mode, with tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from drafter.acceptance.contract import Verifier
from drafter.drafters.contract import Committed, Drafter
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.heads.checkpoint import new_head
from drafter.methods.fly.method import FlyVerifier, LongChainDrafter
from drafter.methods.learning.drafter import ChangingHead
from drafter.methods.learning.settings import StartingHead
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.methods.pad.method import BaseOfClassifier, PadVerifier
from drafter.methods.typical.verifier import TypicalVerifier
from drafter.requests import SamplingParams
from drafter.target_model.model import BaseModel
from tests.methods.pad.test_pad import classifier_folder
from tests.support.fake_gpus import fake_gpus, move_to_gpus
from tests.support.fake_steps import FakeStep, on_gpu
from tests.support.guides import RuleGuide
from tests.support.heads import COUNTS, KINDS, STATIC, make_head
from tests.support.marks import slow_but
from tests.support.models import EOS, VOCABULARY, random_model
from tests.support.tapes import Tape

MODES: dict[str, tuple[SamplingParams, SamplingParams | None]] = {
    "greedy": (SamplingParams(), None),
    "sampled": (SamplingParams(temperature=0.7), None),
    "top-k and top-p": (SamplingParams(temperature=0.7, top_p=0.9, top_k=20), None),
    "min-p": (SamplingParams(temperature=0.7, min_p=0.01), None),
    "mixed": (SamplingParams(temperature=0.7, top_p=0.9), SamplingParams()),
    "penalised": (SamplingParams(repetition_penalty=1.1, presence_penalty=0.4), None),
    "biased": (SamplingParams(logit_bias={5: 1.0}), None),
    "limited": (SamplingParams(min_tokens=3, bad_words=("5 6", "7"), allowed_token_ids=(5, 6, 7, 8)), None),
    "everything": (
        SamplingParams(
            temperature=1.0, top_p=0.9, min_p=0.01, frequency_penalty=0.3, logit_bias={5: 1.0}, min_tokens=2
        ),
        SamplingParams(),
    ),
}
NODES, ROWS, LENGTH = 7, 4, 48


def _head(kind: str, base: BaseModel, tree: str = "exact", **settings: Any) -> Callable[[], Drafter]:
    head = make_head(base, kind, **settings)

    def make() -> Drafter:
        on_gpu(head, base.device)
        return head.drafter(base, NODES, tree)  # type: ignore[arg-type]

    return make


def _without_training(name: str, base: BaseModel) -> Callable[[], Drafter]:
    return lambda: load_drafter(name, base, NODES)


def _merged(base: BaseModel) -> Callable[[], Drafter]:
    head = _head("context 2", base)
    return lambda: MergedDrafter(head(), NgramDrafter(NODES))


def _exit(base: BaseModel) -> Callable[[], Drafter]:
    base.allow_packing()  # which compares numbers, and fakes have none
    return lambda: FirstLayersDrafter(base, 2, NODES)


def _imitation(base: BaseModel) -> Callable[[], Drafter]:
    base.allow_packing()
    head = new_head("imitation", base, {"layers": 2, "draft_vocab_size": 90}, COUNTS)

    def make() -> Drafter:
        on_gpu(head, base.device)
        return head.drafter(base, NODES)

    return make


DRAFTERS: dict[str, Callable[[BaseModel], Callable[[], Drafter]]] = {
    **{name: partial(_without_training, name) for name in TRAINING_FREE},
    **{kind: partial(_head, kind) for kind in KINDS},
    **{f"{kind}, static": partial(_head, kind, tree="static") for kind in STATIC},
    "context 2, factored": partial(_head, "context 2", joint_size=4),
    "context 2 + ngram": _merged,
    "long": lambda base: lambda: LongChainDrafter(NgramDrafter(NODES), NODES),
    "exit": _exit,
    "imitation": _imitation,
}
"""Makes of a base, before it is on the GPUs, what makes a drafter there."""
ENDS = ("greedy", "everything")
CASES = [
    *((name, mode, gpus) for name in DRAFTERS for mode, gpus in (("greedy", 2), ("everything", 1))),
    *((name, mode, 1) for name in ("none", "ngram", "context 2") for mode in MODES if mode not in ENDS),
]
"""No drafter sees how tokens are drawn, so that each meets the two ends of the modes, and three meet all."""
FAST = [
    *((name, "greedy", 2) for name in ("memory", "context 2, in part", "hydra++")),
    *((name, "everything", 1) for name in ("none", "ctc, static", "context 2 + ngram", "imitation")),
]


def _llama() -> BaseModel:
    with mock.patch("drafter.target_model.model.prepack"):
        return BaseModel(random_model("llama"), native=False)


def _forcing() -> RuleGuide:
    """A guide that leaves no choice about as many tokens as a tree may have."""
    return RuleGuide(lambda output: [3 + len(output)] if len(output) < NODES else [3, 4], VOCABULARY, EOS)


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
        guide = _forcing() if name == "forced" else None  # without one this drafter drafts nothing
        step = FakeStep(base, drafter, ROWS, nodes, LENGTH, sampling, other, guide=guide, queued=True).prepared()
        if name.endswith("static"):
            step()  # sends its fixed tree, once; the first step of a shape is never recorded
        with Tape() if drafter.spec.graph_safe else nullcontext():
            outcome = step()
        assert outcome.packed.device == base.device == torch.device("cuda", 0)
        assert outcome.packed.shape == (ROWS, 2 + 2 * (min(drafter.spec.max_depth, nodes) + 1) if nodes else 1)


@pytest.mark.parametrize("name", ["fly", "pad", "typical"])
@pytest.mark.parametrize("mode", ["greedy", "everything"])
def test_a_lenient_verifier_waits_for_no_device(name: str, mode: str, tmp_path: Path) -> None:
    base = _llama()
    of_base = BaseOfClassifier(base.name, base.fingerprint, 1)
    verifiers: dict[str, Callable[[], Verifier]] = {
        "fly": lambda: FlyVerifier(window=3),
        "pad": lambda: PadVerifier(classifier_folder(tmp_path / "pad", of_base, base.hidden_size)),
        "typical": TypicalVerifier,
    }
    verifier = verifiers[name]()
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 1)
        for part in filter(lambda one: isinstance(one, nn.Module), vars(verifier).values()):
            on_gpu(part, base.device)
        step = FakeStep(base, NgramDrafter(NODES), ROWS, NODES, LENGTH, *MODES[mode], verifier, queued=True).prepared()
        with Tape():
            outcome = step()
        assert outcome.lenient is not None
        assert outcome.lenient.device == torch.device("cuda", 0)


def test_a_head_changes_on_a_gpu_without_waiting_and_is_recorded_before() -> None:
    base = _llama()
    head = make_head(base, "context 2")
    with (
        fake_gpus(),
        torch.inference_mode(),
        mock.patch("drafter.methods.learning.drafter.load_start", return_value=head),
    ):
        move_to_gpus(base, 1)
        on_gpu(head, base.device)
        changing = ChangingHead(StartingHead(), base, NODES)
        step = FakeStep(base, MergedDrafter(changing, NgramDrafter(NODES)), ROWS, NODES, LENGTH, queued=True).prepared()
        with Tape():
            step()
        weights = {name: torch.empty(tensor.shape) for name, tensor in head.state_dict().items()}
        # Fakes have no numbers that could be checked, and are the thread's that made them.
        room = "drafter.methods.learning.drafter"
        with mock.patch(f"{room}.check_weights"), mock.patch(f"{room}.in_passing_thread", lambda work: work()):
            changing.offer(1, weights)
        changing.observe(Committed([], []))
        assert changing.version == 1
        with Tape():
            outcome = step()
        assert outcome.packed.device == base.device
