"""Packed trees: only the nodes that are there are computed, and every one as in a padded batch."""

from __future__ import annotations

import pytest
import torch

from drafter.drafters.contract import Ask, DraftContext, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.target.attention import Packing
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.models import FAMILIES, OracleDrafter, SpellingTokenizer, random_model, random_prompts, run_engine

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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_forward_is_a_padded_one(family: str) -> None:
    base = BaseModel(random_model(family))
    assert base.allow_packing() == (family not in OWN_ATTENTION)
    assert base.allow_packing() == (family not in OWN_ATTENTION)  # asked again, by another engine
    if family in OWN_ATTENTION:
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
            made = base.verify(cache, TreeNodes(tokens, lengths, depths, ancestors, 12, packing))
            # What later steps read: the keys and values of the nodes that are there.
            keys = cache.buffers[0].unflatten(0, (-1, 4, 16))
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "llama4_text", "gpt_oss"])
def test_rows_may_have_trees_of_any_sizes(family: str) -> None:
    base = BaseModel(random_model(family))
    requests = [
        Request(prompt, SamplingParams(20, temperature=row % 2, seed=row, presence_penalty=0.5 * (row % 3)))
        for row, prompt in enumerate(random_prompts(9, seed=4))
    ]
    expected = [one.token_ids for one in run_engine(base, PlainDecoding(), requests, max_num_seqs=1)]
    texts = [[*r.prompt_ids, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    engine = Engine(base, CutDrafter(texts), SpellingTokenizer(), EngineConfig(max_num_seqs=4, num_draft_tokens=9))
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    generations = [handle.result(0) for handle in handles]
    assert [one.token_ids for one in generations] == expected
    assert sum(one.counts.num_accepted_draft_tokens for one in generations) > 20
    assert len({nodes for one in generations for nodes in one.counts.per_step_accepted}) > 3
