"""What is committed and the tree are attended to apart, and merged: the same as masked attention over both."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from drafter.target import attention as prefix_attention
from drafter.target.attention import (
    CommittedLayers,
    Packing,
    Prefix,
    additive,
    flash_prefix_attention,
    folded,
    masked_prefix_attention,
    merge_attention,
    merge_tree,
    parts_of,
    tree_attention,
    tree_attention_mask,
)
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from tests.support.models import random_model


def test_two_sets_are_merged_by_their_sums() -> None:
    """Scores log 1 and log 3, of values 8 and 4: together (1 · 8 + 3 · 4) ÷ 4."""
    values, lses = torch.tensor([[[8.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]]).log()
    mixed, lse = merge_attention(values, lses)
    assert mixed.tolist() == [[5.0]]
    assert lse.exp().tolist() == pytest.approx([4.0])


def test_a_tree_and_what_is_before_it_are_merged_as_any_two_sets() -> None:
    values, lses = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    lses[0, 1], values[0, 1] = -torch.inf, 0.0  # nothing is committed
    torch.testing.assert_close(
        merge_tree(*((values[one], lses[one]) for one in (0, 1))), merge_attention(values, lses)[0]
    )


def test_a_set_of_nothing_has_no_weight() -> None:
    nothing = -torch.inf
    values = torch.tensor([[[0.0], [0.0]], [[7.0], [0.0]]])
    mixed, lse = merge_attention(values, torch.tensor([[nothing, nothing], [2.0, nothing]]))
    assert mixed.tolist() == [[7.0], [0.0]]
    assert lse.tolist() == [2.0, nothing]


def test_how_many_parts() -> None:
    assert parts_of(1, 8, 4, 8264) == 32
    assert parts_of(1, 8, 4, 512) == 2
    assert parts_of(1, 8, 256, 8264) == 5  # each of which reads more than its queries take
    assert parts_of(16, 8, 4, 2048) == 2
    assert parts_of(64, 8, 4, 2048) == 1
    assert parts_of(1, 4096, 4, 2048) == 1


def flash_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    *args: object,
    scale: float,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What the kernel promises: sequences of queries and keys, one after another; +inf for a sequence without keys."""
    mixed, lse = torch.zeros_like(query), torch.full((query.shape[1], len(query)), torch.inf)
    assert {one.dtype for one in (cum_q, cum_k, seqused_k)} == {torch.int32}
    assert len(cum_q) == len(cum_k) == len(seqused_k) + 1
    for number, used in enumerate(seqused_k.tolist()):
        some = slice(int(cum_q[number]), int(cum_q[number + 1]))
        keys, values = (one[int(cum_k[number]) :][:used].transpose(0, 1) for one in (key, value))
        if used:
            keys, values = (one.repeat_interleave(query.shape[1] // len(one), 0) for one in (keys, values))
            scores = query[some].transpose(0, 1) @ keys.mT * scale
            mixed[some] = (scores.softmax(-1) @ values).transpose(0, 1)
            lse[:, some] = scores.logsumexp(-1)
    return mixed, lse, *(torch.zeros(0),) * 3


@settings(max_examples=60)
@given(st.data())
def test_both_ways_are_masked_attention(data: st.DataObject) -> None:
    """Over random trees, lengths (zero too), groups of query heads, sizes of heads, and parts."""
    seed = data.draw(st.integers(0, 1 << 20))
    torch.manual_seed(seed)
    rows, nodes, shared = (data.draw(st.integers(1, most)) for most in (4, 6, 3))
    groups, dim, slot = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 8, 16])), 24
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, slot - nodes), min_size=rows, max_size=rows)))
    parents = torch.stack([torch.randint(max(node, 1), (rows,)) for node in range(nodes)], 1)
    ancestors = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    for row in range(rows):
        for node in range(nodes):
            if node:
                ancestors[row, node] = ancestors[row, int(parents[row, node])]
            ancestors[row, node, node] = True
    query = torch.randn(rows, shared * groups, nodes, dim)
    keys, values = torch.randn(2, (rows + 1) * slot, shared, dim)
    places = (torch.arange(rows) * slot + lengths)[:, None] + torch.arange(nodes)
    of_nodes = keys[places].transpose(1, 2), values[places].transpose(1, 2)
    key, value = (one.unflatten(0, (-1, slot))[:rows].transpose(1, 2) for one in (keys, values))
    layer = nn.Module()
    layer.layer_idx, layer.num_key_value_groups = 0, groups  # type: ignore[assignment]
    depths = torch.zeros(rows, nodes, dtype=torch.long)
    seen = tree_attention_mask(lengths, depths, ancestors, slot)
    expected, _ = tree_attention(layer, query, key, value, folded(additive(seen, query.dtype), groups), scaling=0.4)
    mask = folded(additive(ancestors, query.dtype), groups)
    for attend in (masked_prefix_attention, flash_prefix_attention):
        parts = data.draw(st.integers(1, 5))
        prefix = Prefix(lengths, slot, parts, attend, groups * nodes)
        committed = [CommittedLayers([(keys, values)], frozenset([0]), prefix)]
        if nodes == 1:  # which sees no more than what its row has, itself included
            for some in {1, parts if groups == 1 else 1}:
                prefix = Prefix(lengths + 1, slot, some, attend, 1, some=True)
                committed.append(CommittedLayers([(keys, values)], frozenset([0]), prefix, all_seen=True))
        with mock.patch.object(torch.ops.aten, "_flash_attention_forward", flash_by_hand):
            for one in committed:
                found, _ = tree_attention(layer, query, *of_nodes, mask, committed=one, scaling=0.4)
                assert torch.allclose(found, expected, atol=2e-6)


FAMILIES = ["llama", "gpt2", "gemma3_text", "qwen3_moe", "granite"]
"""With and without KV heads that are shared, with layers that do not see all, with a scale of its own."""


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.target.model.prefix_attention_on", lambda device, dtype: masked_prefix_attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_same_in_parts(in_parts: None, family: str) -> None:
    base = BaseModel(random_model(family), native=False)
    rows, nodes, lengths = 3, 5, torch.tensor([9, 0, 30])
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (rows, nodes))
    ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril().repeat(rows, 1, 1)
    depths = torch.arange(nodes).repeat(rows, 1)
    real = torch.arange(nodes) < torch.tensor([[5], [1], [3]])
    tree = TreeNodes(ids, lengths, depths, ancestors, 40)
    single = TreeNodes(ids[:, :1], lengths, depths[:, :1], ancestors[:, :1, :1], 40)
    found, singles = [], []
    for packs in (False, True):
        cache = base.new_cache(rows, 48)
        for row, length in enumerate(lengths.tolist()):
            if length:
                base.prefill(cache, row, [torch.arange(3, 3 + length)])
        if packs:
            assert base.allow_packing()
            assert base._model_code.prefix_attention is masked_prefix_attention
            packed = TreeNodes(ids, lengths, depths, ancestors, 40, Packing.of(real))
            found.append(base.verify(cache, packed))
        found.append(base.verify(cache, tree))
        singles.append(base.verify(cache, single))
    before, in_two, after = found
    for masked, apart in zip(*singles, strict=True):
        assert torch.allclose(apart, masked, atol=1e-5, rtol=1e-5)
    for masked, some, apart in zip(before, in_two, after, strict=True):
        assert torch.allclose(apart, masked, atol=1e-5, rtol=1e-5)
        assert torch.allclose(some[real], masked[real], atol=1e-5, rtol=1e-5)
    assert base.reads_to_length == (family != "gemma3_text")


@pytest.mark.slow
def test_compiled_it_has_no_more_variants_than_with_a_mask(in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and several, one node and several: nothing is compiled later. The compiler itself is left out."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    compile_ = partial(torch.compile, backend=backend)
    monkeypatch.setattr("drafter.target.forward.torch.compile", compile_)
    base = BaseModel(random_model("llama"), native=False)
    assert base.allow_packing()
    assert base.reads_to_length
    cache = base.new_cache(6, 96)

    def tree(rows: int, nodes: int) -> TreeNodes:
        torch.manual_seed(rows * nodes)
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1)
        depths, lengths = torch.arange(nodes).repeat(rows, 1), torch.full((rows,), 20)
        return TreeNodes(torch.randint(3, 90, (rows, nodes)), lengths, depths, ancestors, 48, full=90)

    sizes = [(1, 1), (1, 5), (5, 1), (5, 6), (3, 4), (2, 7), (1, 9), (4, 1)]
    with torch.inference_mode():
        base.prefill(cache, 0, [torch.arange(3, 23)])
        expected = [base.verify(cache, tree(*size))[0] for size in sizes]
        base.compile()
        for size, logits in zip(sizes, expected, strict=True):
            assert torch.allclose(base.verify(cache, tree(*size))[0], logits, atol=1e-5)
        assert len(graphs) == 4
    torch._dynamo.reset()


def test_what_gives_other_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, lse = masked_prefix_attention(*args)  # type: ignore[arg-type]
        return mixed, lse + 1

    def missing(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("no such kernel")

    for attend in (wrong, missing):
        monkeypatch.setattr("drafter.target.model.prefix_attention_on", lambda device, dtype, one=attend: one)
        base = BaseModel(random_model("llama"), native=False)
        assert base.allow_packing()
        assert not base.reads_to_length
    assert caplog.text.count("flash attention gives other numbers") == 2


def test_only_a_gpu_in_half_precision_has_it() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    on = prefix_attention.prefix_attention_on
    assert on(cuda, torch.bfloat16) is flash_prefix_attention
    assert on(cuda, torch.float32) is on(cpu, torch.bfloat16) is None
