"""What is exported has the names, the shapes and the configuration that the public code has for such a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter.errors import LoadError
from drafter.heads.checkpoint import export_head, load_head, new_head, save_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.published import TargetOfExport
from drafter.target_model.model import BaseModel
from tests.methods.eagle3.test_eagle3_layout import CASES, DATA, VOCABULARY, WIDTH
from tests.support.heads import make_head, sequence
from tests.support.public_heads import base_with_embeddings
from tests.support.trees import check_same_trees

LIKE: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0},
    "llama, normed": {
        "rope_theta": 500.0,
        "norm_before_residual": True,
        "fusion_norm": "each",
        "norm_output": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {"fusion_norm": "whole", "qk_norm": True},
}
"""The heads of the public code's numbers, in our terms."""


def exported(head: DraftHead, base: BaseModel, tmp_path: Path) -> Path:
    head.provenance = Provenance(base.name, base.fingerprint)
    save_head(head, tmp_path / "head")
    (tmp_path / "export").mkdir()
    embeddings = base.embed(torch.arange(base.vocab_size))
    of = TargetOfExport("the base", ["LlamaForCausalLM"], 2048, embeddings)
    export_head(tmp_path / "head", tmp_path / "export", of)
    return tmp_path / "export"


@pytest.mark.parametrize("name", LIKE)
def test_an_exported_head_is_what_the_public_code_reads(tmp_path: Path, name: str) -> None:
    base, case = base_with_embeddings(VOCABULARY, WIDTH), CASES[name]
    counts = torch.zeros(VOCABULARY, dtype=torch.long).index_fill(0, torch.tensor(DATA["draft_tokens"]), 1)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 6, "intermediate_size": 12, "norm_eps": 1e-5, "depth": 3}
    head = new_head("eagle3", base, {**sizes, **LIKE[name], "draft_vocab_size": 9}, counts)
    folder = exported(head, base, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert {key: list(one.shape) for key, one in tensors.items()} == case["shapes"]
    assert (tensors["d2t"] + torch.arange(9)).tolist() == DATA["draft_tokens"]
    assert tensors["t2d"].nonzero().flatten().tolist() == DATA["draft_tokens"]

    config, expected = json.loads((folder / "config.json").read_text()), case["config"]
    layer, expected_layer = config.pop("transformer_layer_config"), expected["transformer_layer_config"]
    assert layer | {"max_position_embeddings": expected_layer["max_position_embeddings"]} == {
        key: expected_layer.get(key, False) for key in layer
    }
    verifier = {"name_or_path": "the base", "architectures": ["LlamaForCausalLM"]}
    assert config.pop("speculators_config") == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": verifier,
    }
    assert config == {key: expected[key] for key in config}


@pytest.mark.parametrize("kind", ["eagle3", "eagle3, in part", "eagle3, normed", "medusa", "medusa, in part"])
def test_an_exported_head_drafts_the_same_when_it_is_read_again(
    tiny_base: BaseModel, tmp_path: Path, kind: str
) -> None:
    head = make_head(tiny_base, kind)
    again = load_head(exported(head, tiny_base, tmp_path), tiny_base)
    tokens, hidden = sequence(tiny_base, 2, 12, layers=head.hidden_layers)
    anchors = torch.tensor([[3, 8], [0, 11]])
    # A published head does not say how deep its trees are: those of depth 4 are the same.
    ours, theirs = (one.trees_at(tiny_base, tokens, hidden, anchors, 5) for one in (head, again))
    assert again.hidden_layers == head.hidden_layers
    check_same_trees(theirs, ours, 4)


def test_what_has_no_such_layout_is_refused(tiny_base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(
        LoadError, match="heads of algorithm 'hydra' have no layout that others read; eagle3, medusa have"
    ):
        exported(make_head(tiny_base, "hydra"), tiny_base, tmp_path / "a")
    with pytest.raises(LoadError, match=r"reads the outputs of three layers, and this one hidden_layers \[0, 2\]"):
        exported(make_head(tiny_base, "eagle3", hidden_layers=[0, 2]), tiny_base, tmp_path / "b")
