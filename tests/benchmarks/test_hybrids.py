"""Paths as rows, which the benchmark times, are what a tree's forward computes."""

from __future__ import annotations

import torch

from benchmarks import hybrids
from drafter.target_model.model import BaseModel
from tests.support.hybrids import hybrid_model


@torch.inference_mode()
def test_paths_as_rows_give_the_logits_of_the_trees() -> None:
    base = BaseModel(hybrid_model("qwen3_5_text"))
    tree = hybrids.random_trees(2, 9, base.vocab_size)
    cache, own = hybrids.read(base, torch.arange(3, 43).view(2, 20), 9)
    logits, _ = base.verify(cache, hybrids.nodes_of(tree, torch.tensor([20, 20])))
    paths, rows = hybrids.paths_of(tree)
    found = hybrids.paths_as_rows(base, own, paths, rows)
    seen = torch.zeros(tree.tokens.shape, dtype=torch.bool)
    for path, row in enumerate(rows.tolist()):
        leaves = [node for node in range(tree.size) if node not in tree.parents[row].tolist()]
        before = sum(other == row for other in rows.tolist()[:path])
        nodes = hybrids.path_to(tree, row, leaves[before])
        assert torch.allclose(found[path, : len(nodes)], logits[row, nodes], atol=1e-4)
        seen[row, nodes] = True
    assert bool(seen.all())
