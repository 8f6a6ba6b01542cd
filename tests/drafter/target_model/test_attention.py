"""Masks, packed nodes, folded heads, and attention in two parts: all as masked attention over a padded batch."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drafter.drafters.contract import Ask, DraftContext
from drafter.requests import Request, SamplingParams
from drafter.target_model import attention as prefix_attention
from drafter.target_model.attention import (
    TREE_ATTENTION,
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
    query_groups,
    tree_attention,
    tree_attention_mask,
)
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.token_tree import TokenTree
from tests.support.caches import kv_of, tree_nodes
from tests.support.marks import slow_but
from tests.support.models import (
    FAMILIES,
    OracleDrafter,
    base_of,
    decode,
    engine_of,
    plainly,
    random_model,
    random_prompts,
    tokens_of,
)
from tests.support.properties import examples


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


@examples(60)
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
    seen = tree_attention_mask(lengths, lengths[:, None] + depths, ancestors, slot)
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


ATTENTIONS = ["llama", "gpt2", "gemma3_text", "qwen3_moe", "granite"]
"""With and without KV heads that are shared, with layers that do not see all, with a scale of its own."""


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.target_model.model.prefix_attention_on", lambda device, dtype: masked_prefix_attention)


@pytest.mark.parametrize("family", ATTENTIONS)
def test_a_model_gives_the_same_in_parts(in_parts: None, family: str) -> None:
    base = BaseModel(random_model(family), native=False)
    rows, nodes, lengths = 3, 5, torch.tensor([9, 0, 30])
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (rows, nodes))
    ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril().repeat(rows, 1, 1)
    depths = torch.arange(nodes).repeat(rows, 1)
    real = torch.arange(nodes) < torch.tensor([[5], [1], [3]])
    tree = tree_nodes(ids, lengths, depths, ancestors, 40)
    single = tree_nodes(ids[:, :1], lengths, depths[:, :1], ancestors[:, :1, :1], 40)
    found, singles = [], []
    for packs in (False, True):
        cache = base.new_cache(rows, 48)
        for row, length in enumerate(lengths.tolist()):
            if length:
                base.prefill(cache, row, [torch.arange(3, 3 + length)])
        if packs:
            assert base.allow_packing()
            assert base._model_code.prefix_attention is masked_prefix_attention
            packed = tree_nodes(ids, lengths, depths, ancestors, 40, Packing.of(real))
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
    monkeypatch.setattr("drafter.target_model.forward.torch.compile", compile_)
    base = BaseModel(random_model("llama", num_hidden_layers=1), native=False)
    assert base.allow_packing()
    assert base.reads_to_length
    cache = base.new_cache(6, 96)

    def tree(rows: int, nodes: int) -> TreeNodes:
        torch.manual_seed(rows * nodes)
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1)
        depths, lengths = torch.arange(nodes).repeat(rows, 1), torch.full((rows,), 20)
        return tree_nodes(torch.randint(3, 90, (rows, nodes)), lengths, depths, ancestors, 48, full=90)

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
        monkeypatch.setattr("drafter.target_model.model.prefix_attention_on", lambda device, dtype, one=attend: one)
        base = BaseModel(random_model("llama"), native=False)
        assert base.allow_packing()
        assert not base.reads_to_length
    assert caplog.text.count("flash attention gives other numbers") == 2


def test_only_a_gpu_in_half_precision_has_it() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    on = prefix_attention.prefix_attention_on
    assert on(cuda, torch.bfloat16) is flash_prefix_attention
    assert on(cuda, torch.float32) is on(cpu, torch.bfloat16) is None


# Root with two children; row 0 has one committed position, row 1 has three.
LENGTHS = torch.tensor([1, 3])
POSITIONS = torch.tensor([[1, 2, 2], [3, 4, 4]])
ANCESTORS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, 3, 3)


def test_nodes_see_the_row_and_their_ancestors_and_nothing_else() -> None:
    mask = tree_attention_mask(LENGTHS, POSITIONS, ANCESTORS, 7)
    assert mask.int().tolist() == [
        [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0]],
    ]


def test_a_window_counts_positions_not_cache_places() -> None:
    # Both children are at position 4, though the second lies at place 5: a window of 3 starts at position 2 for both.
    mask = tree_attention_mask(LENGTHS[1:], POSITIONS[1:], ANCESTORS[1:], 6, window=3)
    assert mask[0].int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1]]


def test_a_chunk_ends_at_its_border() -> None:
    mask = tree_attention_mask(LENGTHS[1:], POSITIONS[1:], ANCESTORS[1:], 6, chunk=2)
    assert mask[0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def test_additive_masks_are_finite() -> None:
    mask = additive(torch.tensor([[[True, False]]]), torch.bfloat16)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.isfinite().all()
    assert mask[0, 0, 0, 0] == 0
    assert mask[0, 0, 0, 1] < -1e30


REAL = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
OWN_ATTENTION = {"gemma2", "falcon", "stablelm", "gpt_oss"}
"""Families that transformers runs without its attention interface, or only with one of their own."""


def test_nodes_that_are_there_follow_one_another() -> None:
    packing = Packing.of(REAL)
    assert packing.nodes.tolist() == [0, 1, 2, 3, 6, 7]
    values = torch.arange(9).view(3, 3)
    assert packing.pack(values).tolist() == [[0, 1, 2, 3, 6, 7]]
    assert packing.unpack(packing.pack(values))[REAL].tolist() == [0, 1, 2, 3, 6, 7]
    assert packing.unpack(torch.randn(1, 6, 2)).shape == (3, 3, 2)


@pytest.mark.parametrize("family", slow_but(["gemma2", "gpt2", "falcon", "gpt_oss", "llama4_text"], FAMILIES))
def test_a_packed_forward_is_a_padded_one(family: str) -> None:
    base = base_of(family)
    # Which heads run natively depends on the machine's vectors.
    packs = family not in OWN_ATTENTION or base.executor_name == "NativeDecoder"
    assert base.allow_packing() == packs
    assert base.allow_packing() == packs  # asked again, by another engine
    if not packs:
        return
    tokens = torch.tensor([[5, 6, 7], [8, 0, 0], [9, 10, 0]])
    lengths = torch.tensor([3, 9, 1])
    depths = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1]])
    ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]]).expand(3, 3, 3)
    found = []
    with torch.inference_mode():
        for packing in (Packing.of(REAL), None):
            cache = base.new_cache(4, 16)
            for row, length in enumerate(lengths.tolist()):
                base.prefill(cache, row, [torch.arange(11, 11 + length)])
            made = base.verify(cache, tree_nodes(tokens, lengths, depths, ancestors, 12, packing))
            # What later steps read: the keys and values of the nodes that are there.
            keys = kv_of(cache).buffers[0].unflatten(0, (-1, 4, 16))
            written = [keys[:, row, at : at + count] for row, (at, count) in enumerate([(3, 3), (9, 1), (1, 2)])]
            found.append([*(values[REAL] for values in made), *written])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


class CutDrafter(OracleDrafter):
    """Cuts each row's tree anywhere."""

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tree = super().propose(context, ask)
        sizes = torch.randint(
            1, tree.size + 1, (len(tree.tokens),), generator=torch.Generator().manual_seed(sum(context.host_lengths))
        )
        return tree.trimmed(sizes)


@pytest.mark.parametrize(
    "family", slow_but(["gemma3_text", "gpt_oss"], ["llama", "gpt2", "gemma3_text", "llama4_text", "gpt_oss"])
)
def test_rows_may_have_trees_of_any_sizes(family: str) -> None:
    base = base_of(family)
    requests = [
        Request(prompt, SamplingParams(20, temperature=row % 2, seed=row, presence_penalty=0.5 * (row % 3)))
        for row, prompt in enumerate(random_prompts(9, seed=4))
    ]
    expected = tokens_of(plainly(base, requests))
    texts = [[*r.prompt_ids, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    engine = engine_of(base, CutDrafter(texts), max_num_seqs=4, num_draft_tokens=9)
    generations = decode(engine, requests)
    assert tokens_of(generations) == expected
    assert sum(one.counts.num_accepted_draft_tokens for one in generations) > 20
    assert len({nodes for one in generations for nodes in one.counts.per_step_accepted}) > 3


BATCH, HEADS, SHARED, NODES, SEEN, DIM = 2, 6, 2, 5, 11, 8


class Layer(nn.Module):
    num_key_value_groups = HEADS // SHARED


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, NODES, DIM)
    key, value = torch.randn(2, BATCH, SHARED, SEEN, DIM)
    mask = torch.rand(BATCH, NODES, SEEN) > 0.4
    mask[:, :, 0] = True
    return query, key, value, additive(mask, torch.float32)


def test_folded_attention_is_that_with_repeated_heads() -> None:
    query, key, value, mask = inputs()
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    found, _ = tree_attention(Layer(), query, key, value, folded(mask, HEADS // SHARED), scaling=0.3)
    assert torch.allclose(found, expected, atol=1e-6)


def test_packed_queries() -> None:
    query, key, value, mask = inputs()
    real = torch.arange(NODES) < torch.tensor([[5], [2]])
    packing = Packing.of(real)
    packed = packing.pack(query.transpose(1, 2)).transpose(1, 2)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask)
    found, _ = tree_attention(Layer(), packed, key, value, folded(mask, HEADS // SHARED), packing)
    assert torch.allclose(found[0], expected[real], atol=1e-6)


def test_a_layer_that_shares_heads_otherwise_gets_the_mask_of_the_nodes() -> None:
    query, _, _, mask = inputs()
    key, value = torch.randn(2, BATCH, HEADS, SEEN, DIM)
    layer = Layer()
    layer.num_key_value_groups = 1
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask)
    found, _ = tree_attention(layer, query, key, value, folded(mask, HEADS // SHARED))
    assert torch.allclose(found, expected, atol=1e-6)


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest result of any operation has that is not a view of its inputs."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
            self.most = max(self.most, result.numel())
        return result


def test_no_kv_head_is_repeated() -> None:
    base = BaseModel(random_model("llama"), native=False)
    rows, nodes, kv_length = 4, 6, 600
    ids, lengths = torch.ones(rows, nodes, dtype=torch.long), torch.full((rows,), kv_length - nodes)
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool).tril()
    tree = tree_nodes(ids, lengths, torch.arange(nodes).expand(rows, -1), ancestors, kv_length)
    cache = base.new_cache(rows, kv_length)

    def largest() -> int:
        with torch.inference_mode(), LargestResult() as noted:  # type: ignore[no-untyped-call]
            base.verify(cache, tree)
        return int(noted.most)

    repeated = rows * base.config.num_attention_heads * kv_length * base.config.head_dim
    assert query_groups(base.config) > 1
    assert largest() == repeated  # as transformers does it
    assert base.allow_packing()
    assert base.model.config._attn_implementation == TREE_ATTENTION
    assert largest() < repeated / query_groups(base.config)
