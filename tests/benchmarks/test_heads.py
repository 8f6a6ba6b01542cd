"""The benchmark of heads: its tables of figures written by hand, and its β beside the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.heads import NODES, beta_table, measure, ratio_table, read_heads
from drafter.errors import LoadError
from drafter.heads.checkpoint import save_head
from drafter.heads.config import Tree
from drafter.heads.contract import Provenance
from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.model import BaseModel
from drafter.training.targets import RegeneratedText
from tests.support.heads import STATIC, make_head
from tests.support.models import random_prompts, run_engine


def head(algorithm: str, *betas: float, static: bool = False) -> dict[str, Any]:
    exact = {str(nodes): beta for nodes, beta in zip(NODES, betas, strict=True)}
    beta = {"exact": exact} | ({"static": {nodes: one - 1 for nodes, one in exact.items()}} if static else {})
    return {"algorithm": algorithm, "parameters": 12345, "beta": beta}


def test_the_tables() -> None:
    heads = {"medusa": head("medusa", 1.5, 2.0, 2.5, 3.0), "ours": head("ctc", 3.0, 3.0, 5.0, 12.0, static=True)}
    assert beta_table(heads).split("\n")[2:] == [
        "| ours | ctc | 12,345 | exact | 3.00 | 3.00 | 5.00 | 12.00 |",
        "| ours | ctc | 12,345 | static | 2.00 | 2.00 | 4.00 | 11.00 |",
        "| medusa | medusa | 12,345 | exact | 1.50 | 2.00 | 2.50 | 3.00 |",
    ]
    assert ratio_table(heads).split("\n") == [
        "| ÷, at 8 / 16 / 32 / 64 nodes | medusa |",
        "| --- | --- |",
        "| ours | 2.00 / 1.50 / 2.00 / 4.00 |",
    ]


def test_ctc_heads_are_compared_with_one_another() -> None:
    heads = {"ours": head("ctc", 2.0, 2.0, 3.0, 4.0), "markov": head("ctc", 1.0, 2.0, 2.0, 2.0)}
    assert ratio_table(heads).split("\n")[2:] == [
        "| ours |  | 2.00 / 1.00 / 1.50 / 2.00 |",
        "| markov | 0.50 / 1.00 / 0.67 / 0.50 |  |",
    ]


@pytest.mark.parametrize("kind", ["ctc, linear", "context 1"])
def test_the_figures_are_the_engines(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    requests = [Request(prompt, SamplingParams(max_new_tokens=20)) for prompt in random_prompts(6)]
    trees: list[Tree] = ["exact", "static"] if kind in STATIC else ["exact"]
    decoded = {
        tree: run_engine(
            tiny_base, head.drafter(tiny_base, NODES[0] + 1, tree), requests, max_num_seqs=3, num_draft_tokens=NODES[0]
        )
        for tree in trees
    }
    texts = [
        RegeneratedText([*request.prompt_ids, *generation.token_ids], len(request.prompt_ids))
        for request, generation in zip(requests, decoded["exact"], strict=True)
    ]
    measured = measure(head, tiny_base, texts)["beta"]
    assert measured.keys() == decoded.keys()
    for tree, generations in decoded.items():
        beta = mean_acceptance_length(total(generation.counts for generation in generations))
        assert beta > 1
        # Rounding may swap nodes of nearly equal probability.
        assert measured[tree][str(NODES[0])] == pytest.approx(beta, rel=0.02)


def test_heads_are_read_from_their_folders_and_from_what_training_wrote(tiny_base: BaseModel, tmp_path: Path) -> None:
    for name in ("first", "second/head"):
        head = make_head(tiny_base, "context 1")
        head.provenance = Provenance("tiny", tiny_base.fingerprint)
        save_head(head, tmp_path / name)
    assert list(read_heads(tmp_path, tiny_base)) == ["first", "second"]
    with pytest.raises(LoadError, match="has no draft heads"):
        read_heads(tmp_path / "first", tiny_base)
