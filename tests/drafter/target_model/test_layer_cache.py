"""A layer whose state is not by position plugs into the target model's cache: here a running sum over the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from drafter.drafters.contract import Drafter, DraftSpec
from drafter.engine.config import EngineConfig
from drafter.engine.memory import plan_memory, slot_length
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import Blocks, CacheBytes, LayerCache, LayerView, TargetCache
from drafter.target_model.cache_factory import CacheFactory
from drafter.target_model.kv_cache import cache_name
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import Nodes, PromptNodes, TreeNodes
from tests.support.caches import tree_nodes
from tests.support.exhaustion import run_out
from tests.support.models import (
    AdversarialDrafter,
    OracleDrafter,
    decode,
    engine_of,
    plainly,
    random_model,
    random_prompts,
    run_engine,
    tokens_of,
)

LAYERS, WIDTH = 3, 32
SUMS = LAYERS  # number of the layer beside the model's own


class SumView(LayerView):
    """Turns inputs `[b, n, d]`, or packed `[1, M, d]`, into running sums."""

    def __init__(self, sums: RunningSums, nodes: Nodes) -> None:
        super().__init__()
        self.sums, self.nodes = sums, nodes

    def update(self, inputs: Tensor, *args: Any, **others: Any) -> Any:
        packing = self.nodes.packing
        if packing is None:
            return self.sums.run(self.nodes, inputs)
        return packing.pack(self.sums.run(self.nodes, packing.unpack(inputs)))


class RunningSums(LayerCache):
    """Two sums for each slot, and the length of the text to which each belongs.

    What a step commits goes to the sum that the present length does not name, so a step that fails loses nothing.
    """

    def __init__(self, slots: int) -> None:
        self.sums, self.at = torch.zeros(2, slots, WIDTH), torch.full((2, slots), -1)
        self.nodes: Tensor | None = None  # `[B, N, d]` of the last forward's nodes

    @property
    def bytes(self) -> CacheBytes:
        size = WIDTH * self.sums.itemsize
        return CacheBytes(slot=2 * size, node=size)

    def views(self, nodes: Nodes, apart: Collection[int]) -> Mapping[int, LayerView]:
        return {SUMS: SumView(self, nodes)}

    def run(self, nodes: Nodes, inputs: Tensor) -> Tensor:
        rows = slice(nodes.slot, nodes.slot + len(inputs))
        known = self.at[:, rows] == nodes.lengths
        before = torch.where(known[1, :, None], self.sums[1, rows], self.sums[0, rows])
        before = torch.where((known.any(0) & (nodes.lengths > 0))[:, None], before, 0)
        if isinstance(nodes, TreeNodes):
            found: list[Tensor] = []
            for node in range(inputs.shape[1]):
                above = before
                if node:
                    parents = nodes.parents[:, node, None, None].expand(-1, 1, WIDTH)
                    above = torch.stack(found, 1).gather(1, parents.clamp_min(0))[:, 0]
                    above = torch.where(parents[:, 0] < 0, before, above)
                found.append(above + inputs[:, node])
            self.nodes = torch.stack(found, 1)
            return self.nodes
        # Before the last token, which may be a pending one that is committed like a tree's root, and after it.
        found_sums = before[:, None] + inputs.cumsum(1)
        counts = torch.tensor([inputs.shape[1]] * len(inputs))
        if nodes.packing is not None:
            counts = nodes.packing.nodes.div(inputs.shape[1], rounding_mode="floor").bincount(minlength=len(inputs))
        row = torch.arange(len(inputs))
        self.sums[1, rows] = found_sums[row, counts - 1]
        self.sums[0, rows] = self.sums[1, rows] - inputs[row, counts - 1]
        self.at[1, rows], self.at[0, rows] = nodes.lengths + counts, nodes.lengths + counts - 1
        self.nodes = self.sums[1, rows, None]
        return found_sums

    def commit(self, lengths: Tensor, path: Tensor, rows: slice) -> None:
        assert self.nodes is not None
        for row, slot in enumerate(range(rows.start, rows.stop)):
            spare = 1 if self.at[0, slot] == lengths[row] else 0
            self.sums[spare, slot] = self.nodes[row, path[row].max()]
            self.at[spare, slot] = lengths[row] + 1 + (path[row] > 0).sum()

    def shareable(self, source: int, length: int) -> int:
        return max([at for at in self.at[:, source].tolist() if 0 < at <= length], default=0)

    def copy(self, source: int, target: int, length: int) -> None:
        self.move(source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.sums[:, target], self.at[:, target] = self.sums[:, source], self.at[:, source]

    def clear(self, slot: int, length: int | None = None) -> None:
        self.sums[:, slot], self.at[:, slot] = 0, -1

    def scrub(self, lengths: Tensor, nodes: int, which: Tensor, rows: slice) -> None:
        """The length of such a row stays, and names the sum from before the step."""

    def zero(self) -> None:
        for slot in range(self.at.shape[1]):
            self.clear(slot)


class SummingAttention(nn.Module):
    """An attention layer that adds the mean of all its inputs so far."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        mixed, weights = self.attention(hidden_states, **others)
        kept = others.get(cache_name(self.attention))
        if kept is not None and len(kept.layers) > LAYERS:
            sums = kept.layers[SUMS].update(hidden_states)
        else:
            sums = hidden_states.cumsum(1)
        return mixed + sums / 8, weights


class SummingCaches(CacheFactory):
    def layer_caches(self, blocks: Blocks, device: torch.device, depth: int) -> Sequence[LayerCache]:
        return [*super().layer_caches(blocks, device, depth), RunningSums(blocks.slots)]


@cache
def summing_model() -> BaseModel:
    """The proof at load, whose trees have decoys, is the first test of the sums."""
    with torch.inference_mode(False):
        model = random_model("llama")
        model.model.layers[1].self_attn = SummingAttention(model.model.layers[1].self_attn)
    with mock.patch("drafter.target_model.model.CacheFactory", SummingCaches):
        return BaseModel(model, native=False)


def requests_of(count: int) -> list[Request]:
    """Greedy and random requests of different lengths, some of the same prompt."""
    prompts = random_prompts(count, seed=5)
    prompts[count // 2] = prompts[0]
    return [
        Request(prompt, SamplingParams(18 - 3 * (row % 4), temperature=0.7 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(prompts)
    ]


@cache
def expected() -> list[list[int]]:
    """What each request's text is by the model itself, without a cache."""
    base, texts = summing_model(), []
    found = plainly(base, requests_of(9))
    for request, one in zip(requests_of(9), found, strict=True):
        if request.sampling.temperature == 0:
            text = torch.tensor([[*request.prompt_ids, *one.token_ids]])
            with torch.inference_mode():
                likeliest = base.model(input_ids=text, use_cache=False).logits.argmax(-1)[0]
            assert likeliest[len(request.prompt_ids) - 1 : -1].tolist() == one.token_ids
        texts.append(one.token_ids)
    return texts


def oracle() -> Drafter:
    return OracleDrafter([[*one.prompt_ids, *text] for one, text in zip(requests_of(9), expected(), strict=True)])


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("make", [oracle, lambda: AdversarialDrafter(0)], ids=["oracle", "adversarial"])
def test_rows_of_other_lengths_in_recycled_slots_have_their_own_sums(make: Any, slots: int) -> None:
    found = run_engine(summing_model(), make(), requests_of(9), max_num_seqs=slots, num_draft_tokens=10)
    assert tokens_of(found) == expected()
    if make is oracle:
        assert sum(one.counts.num_accepted_draft_tokens for one in found) > 50


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["prefill_last", "verify", "commit"])
def test_a_step_that_fails_leaves_the_sums_from_before_it(
    monkeypatch: pytest.MonkeyPatch, stage: str, late: bool
) -> None:
    """Before or after it has written; half of the rows are preempted, and come back."""
    base, drafter = summing_model(), oracle()
    engine = engine_of(base, drafter, max_num_seqs=6, num_draft_tokens=10)
    owner = engine.batch.cache if stage == "commit" else base
    monkeypatch.setitem(vars(owner), stage, run_out(getattr(owner, stage), {2, 5}, late=late))
    assert tokens_of(decode(engine, requests_of(9), stream=True)) == expected()
    assert engine.state().preemptions > 0


def test_the_plan_has_what_a_slot_and_a_node_take() -> None:
    config, spec = EngineConfig(max_num_seqs=4), DraftSpec(max_nodes=10, max_depth=5)
    length = slot_length(64, 10, 5)
    with_sums, without = (base.cache_bytes for base in (summing_model(), BaseModel(random_model("llama"))))
    assert with_sums == without + CacheBytes(slot=2 * WIDTH * 4, node=WIDTH * 4)
    assert summing_model().new_cache(4, length).nbytes == without.position * 4 * length + 4 * 2 * WIDTH * 4
    planned = plan_memory(summing_model(), spec, config, 64, 0).items["KV cache"]
    assert planned == without.position * 4 * length + 4 * 2 * WIDTH * 4 + 4 * 11 * WIDTH * 4


def test_a_text_is_shared_as_far_as_its_sum_is_known() -> None:
    base = summing_model()
    kept = base.new_cache(3, 32)
    base.prefill(kept, 0, [torch.arange(5, 15)])
    assert kept.copy(0, 1, 7) == 0
    assert kept.copy(0, 1, 12) == 10
    kept.move(1, 2, 10)
    for slot in (0, 2):
        logits, _ = base.prefill_last(kept, slot, torch.tensor([20]), 10)
        with torch.inference_mode():
            alone = base.model(input_ids=torch.tensor([[*range(5, 15), 20]]), use_cache=False).logits[0, -1]
        assert torch.allclose(logits[0], alone, atol=1e-3)


def test_only_the_accepted_node_counts_and_only_for_the_new_length() -> None:
    sums, blocks = RunningSums(2), Blocks(2, 32, torch.device("cpu"))
    kept = TargetCache(blocks, [sums], LAYERS)
    ones = torch.ones(1, 4, WIDTH)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    text = PromptNodes(tokens=tokens, lengths=torch.tensor([0]), positions=tokens, kv_length=4)
    sums.run(text, ones)
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()[None]
    depths, length = torch.tensor([[0, 1, 1, 2]]), torch.tensor([4])
    tree = tree_nodes(tokens, length, depths, ancestors, 8)
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0])[None, :, None] * ones
    assert sums.run(tree, weights)[0, :, 0].tolist() == [5, 15, 105, 1105]
    kept.commit(length, torch.tensor([[0, 2, 3]]), slice(0, 1))
    again = sums.run(tree, weights)  # the length has not changed, as after a step that failed
    assert again[0, :, 0].tolist() == [5, 15, 105, 1105]
    kept.commit(length, torch.tensor([[0, 1, 0]]), slice(0, 1))
    after = tree_nodes(tokens[:, :1], torch.tensor([6]), depths[:, :1], ancestors[:, :1, :1], 8)
    assert sums.run(after, ones[:, :1])[0, 0, 0] == 16
