""""""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head
from drafter.heads.frame_head import ResidualBlocks
from drafter.methods.medusa.head import MedusaHead
from drafter.target_model.model import BaseModel
from tests.support.public_heads import base_with_embeddings, formula, write_head

VOCABULARY, WIDTH, HEADS_OF_IT = 23, 8, 2
PUBLISHED = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/base"}
VLLM = {"model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_heads": 2, "num_hidden_layers": 1}

LOGITS = [
    [
        [-0.10326, -0.04412, 0.03483, 0.09815, 0.11741, 0.08396],
        [0.02491, -0.12232, -0.21464, -0.21062, -0.11206, 0.0368],
        [0.28175, 0.00329, -0.27664, -0.4324, -0.39407, -0.17885],
    ],
    [
        [0.11786, -0.47065, -0.8479, -0.84456, -0.46212, 0.12775],
        [0.64538, 0.04323, -0.57832, -0.94028, -0.88018, -0.42499],
        [1.04799, 0.69491, 0.02991, -0.64851, -1.03584, -0.95821],
    ],
]
"""Logits of the first six tokens, of two heads at three hidden states, by FasterDecoding/Medusa at commit e2a5d20: its
own residual block, put together as its model does, with weights and hidden states by the formula."""


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_with_embeddings(VOCABULARY, WIDTH)


def published() -> dict[str, Tensor]:
    shapes = {"{0}.0.linear.weight": (WIDTH, WIDTH), "{0}.0.linear.bias": (WIDTH,), "{0}.1.weight": (VOCABULARY, WIDTH)}
    names = {name.format(head): shape for head in range(HEADS_OF_IT) for name, shape in shapes.items()}
    return {name: formula(name, shape) for name, shape in names.items()}


def as_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for head in range(HEADS_OF_IT):
        found[f"blocks.{head}.layers.0.weight"] = tensors[f"{head}.0.linear.weight"]
        found[f"blocks.{head}.layers.0.bias"] = tensors[f"{head}.0.linear.bias"]
        found[f"lm_heads.{head}.weight"] = tensors[f"{head}.1.weight"].clone()
    return found


def loaded(folder: Path, base: BaseModel) -> MedusaHead:
    head = load_head(folder, base)
    assert isinstance(head, MedusaHead)
    return head


@pytest.mark.parametrize("layout", ["published", "with a prefix", "vLLM"])
def test_loaded_heads_compute_what_the_public_code_does(base: BaseModel, tmp_path: Path, layout: str) -> None:
    tensors, config, file = published(), PUBLISHED, "medusa_lm_head.safetensors"
    if layout == "with a prefix":
        tensors = {f"medusa_head.{name}": one for name, one in tensors.items()}
    if layout == "vLLM":
        tensors, config, file = as_vllm(tensors), VLLM, "model.safetensors"
    head = loaded(write_head(tmp_path, config, tensors, file), base)
    hidden = formula("hidden", (3, WIDTH))
    assert isinstance(head.module, ResidualBlocks)
    states = head.module.frames(hidden)
    expected = torch.tensor(LOGITS).transpose(0, 1)
    logits = torch.einsum("nud,uvd->nuv", states, head.outputs)
    assert torch.allclose(logits[..., :6], expected, atol=1e-4)
    assert torch.equal(head.log_probs(states).argmax(-1), logits.argmax(-1))
    assert head.provenance is not None
    assert head.provenance.base_name == ("" if layout == "vLLM" else "some/base")


def test_a_part_of_the_vocabulary(base: BaseModel, tmp_path: Path) -> None:
    tokens = torch.tensor([2, 5, 7, 11])
    tensors = {name: one[tokens] if "lm_heads" in name else one for name, one in as_vllm(published()).items()}
    folder = write_head(tmp_path, VLLM | {"truncated_vocab_size": 4}, tensors | {"token_map": tokens})
    head = loaded(folder, base)
    assert head.config.draft_vocab_size == 4
    assert head.base_tokens(torch.arange(4)).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("config", "leave_out", "reason"),
    [
        (PUBLISHED | {"medusa_num_layers": 2}, "", "has 2 residual blocks a head, and only one can be run"),
        (PUBLISHED | {"tree_attention": "clover"}, "", "its config.json has 'tree_attention', which may mean"),
        (PUBLISHED | {"medusa_num_heads": 3}, "", r"tensor '2\.0\.linear\.weight' is missing"),
        (
            PUBLISHED | {"medusa_num_heads": None},
            "",
            "its config.json says medusa_num_heads = None, which is no number",
        ),
        (PUBLISHED | {"medusa_num_heads": 2.0}, "", "says medusa_num_heads = 2.0, which is no integer above 0"),
        (PUBLISHED | {"medusa_num_heads": 0}, "", "says medusa_num_heads = 0, which is no integer above 0"),
        (PUBLISHED | {"base_model_name_or_path": 7}, "", "its config.json names as its model 7, which is no text"),
        (PUBLISHED, "1.1.weight", r"tensor '1\.1\.weight' is missing"),
        (PUBLISHED, "1.0.linear.bias", r"tensor '1\.0\.linear\.bias' is missing"),
        (PUBLISHED, "0.0.linear.bias", r"has a tensor '1\.0\.linear\.bias', which no head of its kind"),
    ],
)
def test_what_cannot_be_run_is_refused(
    base: BaseModel, tmp_path: Path, config: dict[str, Any], leave_out: str, reason: str
) -> None:
    tensors = {name: one for name, one in published().items() if name != leave_out}
    with pytest.raises(LoadError, match=reason):
        load_head(write_head(tmp_path, config, tensors), base)


@pytest.mark.parametrize("shape", [(VOCABULARY - 1, WIDTH), (VOCABULARY,)])
def test_output_layers_that_do_not_match_are_refused(base: BaseModel, tmp_path: Path, shape: tuple[int, ...]) -> None:
    for name in ("0.1.weight", "1.1.weight"):
        folder = write_head(tmp_path / name, PUBLISHED, published() | {name: formula(name, shape)})
        with pytest.raises(LoadError, match=f"^draft head '{folder}'"):
            load_head(folder, base)


def test_heads_of_another_base_are_refused(tmp_path: Path) -> None:
    other = base_with_embeddings(VOCABULARY + 1, WIDTH)
    with pytest.raises(LoadError, match="to the target model 'some/base', not to 'the base': its vocab_size is 23"):
        load_head(write_head(tmp_path, PUBLISHED, published()), other)


def test_heads_are_counted_where_they_are(base: BaseModel, tmp_path: Path) -> None:
    head = loaded(write_head(tmp_path, PUBLISHED | {"medusa_num_heads": 1}, published()), base)
    assert head.config.depth == HEADS_OF_IT


def test_heads_without_output_layers_are_refused(base: BaseModel, tmp_path: Path) -> None:
    tensors = {name: one for name, one in published().items() if not name.endswith(".1.weight")}
    folder = write_head(tmp_path, PUBLISHED, tensors)
    with pytest.raises(LoadError, match="has no output layers: it takes the target model's LM head"):
        load_head(folder, base)
