"""Steps whose attention reads each row to its own length: the same tokens, and few shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.acceptance.contract import ExactVerifier
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loan, PlainDecoding
from drafter.drafters.model_drafter import ModelDrafter
from drafter.engine.batch import BatchState
from drafter.engine.cuda_graph import Part, Work
from drafter.engine.queued_step import QueuedStep
from drafter.engine.step import DeviceStep
from drafter.heads.attention import AttentionModule, AttentionReader
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes, total
from drafter.target_model.attention import flash_prefix_attention, masked_prefix_attention
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, bare_trees
from tests.support.heads import make_head, sequence
from tests.support.large_bases import LLAMA_8B, large_base
from tests.support.live_memory import LiveMemory
from tests.support.marks import pairwise, slow_but
from tests.support.models import (
    AdversarialDrafter,
    decode,
    engine_of,
    random_model,
    random_prompts,
    run_engine,
    tokens_of,
)
from tests.support.tapes import TapeRecorder
from tests.support.waits import tensors_of


class Certain(ModelDrafter):
    """Drafts chains: the likeliest token has nearly all probability."""

    def _log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        return super()._log_probs(1000 * logits)


PLACES = ("drafter.target_model.model", "drafter.heads.attention")
DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "none": lambda base: PlainDecoding(),
    "ctc": lambda base: make_head(base, "ctc").drafter(base, 8),
    "adversarial": lambda base: AdversarialDrafter(0),
    "hydra++": lambda base: make_head(base, "hydra++").drafter(base, 8),
    "medusa": lambda base: make_head(base, "medusa").drafter(base, 8),
    "itself": lambda base: Certain(base, base, 4),
}
CASES = [
    *pairwise(2, ["llama", "gemma3_text"], ["adversarial", "none", "ctc", "hydra++", "medusa"], [True, False]),
    *pairwise(2, ["llama"], ["itself"], [True, False]),
]


def read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        monkeypatch.setattr(f"{place}.prefix_attention_on", lambda device, dtype: masked_prefix_attention)


@pytest.mark.parametrize(("family", "name", "queued"), CASES)
def test_the_same_tokens_as_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, family: str, name: str, queued: bool
) -> None:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"frequency_penalty": 0.5}]
    requests = [
        Request(prompt, SamplingParams(16 - row, seed=row, ignore_eos=row % 3 > 0, **settings[row % 3]))
        for row, prompt in enumerate(random_prompts(6, seed=3))
    ]
    expected = run_engine(BaseModel(random_model(family), native=False), PlainDecoding(), requests, max_num_seqs=1)
    read_in_parts(monkeypatch)
    recorder = TapeRecorder()
    if queued:
        monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
        monkeypatch.setattr("drafter.engine.cuda_graph.CudaRecorder", recorder)
    base = BaseModel(random_model(family), native=False)
    engine = engine_of(base, DRAFTERS[name](base), max_num_seqs=4, max_model_len=96, num_draft_tokens=8)
    assert base._model_code.prefix_attention is masked_prefix_attention
    found = decode(engine, requests)
    assert tokens_of(found) == tokens_of(expected)
    assert (recorder.repeated > 10) == queued
    if name == "itself":  # keys of nodes that ran before are seen, or it would draft something else from there on
        greedy = total(one.counts for one in found[::3])
        assert greedy.num_accepted_draft_tokens > 0.8 * greedy.num_draft_tokens


@torch.inference_mode()
def test_frames_are_the_same(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = AttentionModule(tiny_base.hidden_size, 5, num_layers=2, num_heads=2, intermediate_size=40, rope_theta=1e4)
    module.requires_grad_(False)
    masked = AttentionReader(module, tiny_base, 5)
    read_in_parts(monkeypatch)
    in_parts = AttentionReader(module, tiny_base, 5)
    assert (masked.bounded, in_parts.bounded) == (True, False)
    tokens, hidden = sequence(tiny_base, 3, 60)
    for drafter in (masked, in_parts):
        drafter.open(Loan(tiny_base, 3, 60, StageTimes()))
    for lengths in ([1, 9, 20], [4, 10, 25]):
        found = []
        for drafter in (masked, in_parts):
            context = DraftContext(tokens, hidden, torch.tensor(lengths), lengths)
            drafter.prepare(context)
            found.append(drafter.read(context, 4))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_frames_read_to_each_rows_end_without_a_bound(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = make_head(tiny_base, "hydra++").drafter(tiny_base, 8)
    assert masked.spec.bounded
    assert not make_head(tiny_base, "medusa").drafter(tiny_base, 8).spec.bounded
    read_in_parts(monkeypatch)
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)  # where the native drafter is not used
    assert not make_head(tiny_base, "hydra++").drafter(tiny_base, 8).spec.bounded


class Largest(TorchDispatchMode):
    """Notes the shapes and types of all results, and how many operations there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        given = {one.untyped_storage() for one in tensors_of((args, kwargs))}
        for one in tensors_of(result):
            if one.untyped_storage() not in given:
                self.results.append((tuple(one.shape), one.dtype))
        return result


SHAPES = [(64, 2048, 15), (1, 8192, 63), (256, 2048, 7)]


@pytest.mark.parametrize("shape", slow_but(SHAPES[:1], SHAPES), ids=str)
def test_what_a_step_of_an_8b_model_makes(shape: tuple[int, int, int]) -> None:
    """On a GPU without numbers: no mask or copy that is as long as the texts, no `[B, N, V]` in float64."""
    rows, length, nodes = shape
    config = deepcopy(LLAMA_8B)
    config.num_hidden_layers = 2
    with large_base(config) as base:
        assert base._model_code.prefix_attention is flash_prefix_attention
        assert base.reads_to_length
        state = BatchState(base, AdversarialDrafter(0, nodes), rows, length, StageTimes())
        step = DeviceStep(base, ExactVerifier(), state, packs=False)
        tree = step.draft(state.bounded_context(rows, length), Ask(nodes))
        with LiveMemory() as memory, Largest() as made:
            step.verify(tree, state.capacity)
        names = made.names
        assert names.count("_flash_attention_forward") == names.count("_scaled_dot_product_efficient_attention") == 2
        tree_size = nodes + 1
        for result, dtype in made.results:
            assert state.capacity not in result, "no mask, and no copy of keys, as long as a slot"
            assert dtype != torch.float64
        logits = rows * tree_size * config.vocab_size * 2
        inner = rows * tree_size * config.intermediate_size * 2
        assert memory.peak < logits + 8 * inner


@pytest.mark.parametrize(
    ("reads_to_length", "bounded", "count"), [(True, False, 96), (True, True, 119), (False, True, 281)]
)
def test_shapes_of_ten_thousand_steps(
    reads_to_length: bool, bounded: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their three parts: 64 slots, as many requests as come, texts of up to 2,048 tokens, and one of four sizes."""
    step = mock.Mock()
    step.state.slots, step.state.max_length, step.state.capacity = 64, 2048, 2112
    step.base.reads_to_length = reads_to_length
    step.state.cache.block = step.state.cache.length = 2112
    step.choices = [SimpleNamespace(spec=DraftSpec(31, 31, bounded=bounded))]
    step.state.mode = SamplingMode.of([])
    step.state.spec.max_nodes = 31
    step.state.context.side_effect = lambda lengths: SimpleNamespace(host_lengths=lengths, longest=max(lengths))
    step.base.cache_bytes.node = 0
    queue, shapes = QueuedStep(step, None), set[Part]()

    def note(part: Part, work: Work) -> None:
        shapes.add(part)

    def trees(rows: int, size: int) -> TokenTree:
        return bare_trees(torch.zeros(rows, dtype=torch.long), size)

    monkeypatch.setattr(queue.graphs, "run", note)
    monkeypatch.setattr(queue, "_tree", trees)
    rng, wanted = random.Random(0), 1
    texts: list[list[int]] = []
    for turn in range(10_000):
        if turn % 100 == 0:
            wanted = rng.choice((1, 2, 4, 8, 16, 24, 48, 64))
        while len(texts) < wanted and rng.random() < 0.4:
            prompt = int(20 * 75 ** rng.random())
            texts.append([prompt, min(prompt + rng.randrange(20, 500), 2047)])
        if texts:
            nodes = rng.choice((0, 7, 15, 31) if len(texts) < 16 else (0, 7))
            queue.whole(len(texts), nodes, max(now for now, _ in texts))
        for text in texts:
            text[0] += rng.randrange(1, 5)
        texts = [text for text in texts if text[0] < text[1]]
    assert len(shapes) == count
