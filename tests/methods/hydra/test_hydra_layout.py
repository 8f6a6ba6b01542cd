""""""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head
from drafter.heads.losses import DraftBatch, hard_labels
from drafter.target_model.model import BaseModel
from tests.support.public_heads import base_with_embeddings, formula, write_head

VOCABULARY, WIDTH, DEPTH = 23, 8, 3
CONFIG = {
    "hydra_num_heads": DEPTH,
    "hydra_num_layers": 2,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "some/base",
}
TOKENS = [5, 2, 7, 7, 9, 1, 20]
LOGITS = [
    [
        [-0.3064, -1.15057, -1.48613, -1.16285, -0.32238, 0.66373],
        [-0.73674, -1.21045, -1.14866, -0.57952, 0.24498, 0.96045],
        [-0.41511, -1.08498, -1.27567, -0.90199, -0.12822, 0.70405],
        [-0.08617, -1.05361, -1.55596, -1.36812, -0.57096, 0.48343],
    ],
    [
        [-0.49565, 0.17826, 0.76497, 1.00586, 0.79867, 0.24066],
        [-0.56273, 0.27277, 0.97866, 1.2428, 0.95251, 0.24235],
        [-0.52243, 0.06118, 0.61016, 0.8828, 0.7626, 0.30778],
        [-0.45258, -0.09738, 0.29435, 0.55151, 0.56452, 0.33183],
    ],
    [
        [-0.12793, -0.03572, 0.0726, 0.15392, 0.17462, 0.12431],
        [-0.15921, -0.01651, 0.13368, 0.22946, 0.23071, 0.13576],
        [0.05496, 0.25726, 0.34418, 0.28219, 0.102, -0.11661],
        [-0.11435, -0.03702, 0.05701, 0.13104, 0.15472, 0.11631],
    ],
]
"""Logits of the first six tokens, of three heads at the first four entries of the text, by the `HydraMLP` of Hydra
(zankner/Hydra) at commit 3f39fbd, with weights and hidden states by the formula."""


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_with_embeddings(VOCABULARY, WIDTH)


def published() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(DEPTH):
        mlp, inputs = f"hydra_mlp.{head}", (head + 2) * WIDTH
        for part in ("linear", "res_connection"):
            shapes |= {f"{mlp}.0.{part}.weight": (WIDTH, inputs), f"{mlp}.0.{part}.bias": (WIDTH,)}
        shapes |= {f"{mlp}.1.linear.weight": (WIDTH, WIDTH), f"{mlp}.1.linear.bias": (WIDTH,)}
        shapes |= {f"hydra_lm_head.{head}.weight": (VOCABULARY, WIDTH), f"hydra_lm_head.{head}.bias": (VOCABULARY,)}
    return {name: formula(name, shape) for name, shape in shapes.items()}


def test_loaded_heads_compute_what_the_public_code_does(base: BaseModel, tmp_path: Path) -> None:
    """By the loss of each token at each place, which is its negative log-probability."""
    head = load_head(write_head(tmp_path, CONFIG, published(), "hydra_lm_head.safetensors"), base)
    tokens, hidden = torch.tensor([TOKENS]), formula("hidden", (1, len(TOKENS), WIDTH))
    for entry in range(4):
        anchors = torch.tensor([[entry + 1]])  # the public code's entry k is the hidden state of token k
        text = torch.tensor([[[*TOKENS, 0][entry + 2 : entry + 5]]])  # no head reads the last one
        for depth in range(DEPTH):
            found = []
            for token in range(6):
                labels = hard_labels(torch.full_like(text, token))
                labels.probs[:, :, torch.arange(DEPTH) != depth] = 0.0
                batch = DraftBatch(tokens, anchors, text, torch.full_like(anchors, DEPTH))
                loss = head(base, batch, hidden, labels)
                found.append(-loss.mean())
            differences = torch.stack(found) - found[0]
            expected = torch.tensor(LOGITS[depth][entry])
            assert torch.allclose(differences, expected - expected[0], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hydra_head_arch": "prefix-mlp"}, "has hydra_head_arch = 'prefix-mlp', and only 'mlp' can be run"),
        ({"grounded_heads": False}, "has grounded_heads = False, and only True can be run"),
        ({"dropout_between": 2}, r"its config\.json has 'dropout_between', which may mean"),
        ({"hydra_num_layers": 3}, r"tensor 'hydra_mlp\.0\.2\.linear\.weight' is missing"),
    ],
)
def test_what_cannot_be_run_is_refused(base: BaseModel, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        load_head(write_head(tmp_path, CONFIG | changes, published()), base)


def test_heads_of_another_base_are_refused(tmp_path: Path) -> None:
    other = base_with_embeddings(VOCABULARY, 2 * WIDTH)
    with pytest.raises(LoadError, match="to the target model 'some/base', not to 'the base': its hidden_size is 8"):
        load_head(write_head(tmp_path, CONFIG, published()), other)
