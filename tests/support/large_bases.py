"""A base of billions of parameters that takes no memory: its tensors have a shape, a type and a GPU, but no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafter.target_model.kv_cache import LayerShape
from drafter.target_model.model import BaseModel
from tests.support.fake_gpus import fake_gpus, place_weights

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
"""The shape of Llama-3.1-8B."""


@contextmanager
def large_base(config: LlamaConfig) -> Iterator[BaseModel]:
    """For a `with` block, a base in bf16 on one fake GPU. What is proved of a base at load is taken to be true."""
    gpu = torch.device("cuda", 0)
    shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, torch.bfloat16, gpu)
    plain: tuple[Any, ...] = [], [], [shape] * config.num_hidden_layers, {}
    where = "drafter.target_model.model"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with (
        fake_gpus(),
        torch.inference_mode(),
        mock.patch(f"{where}.run_plainly", return_value=plain),
        mock.patch(f"{where}.prove_tree_decoding"),
        mock.patch(f"{where}.attention_agrees", side_effect=lambda base, change, *_: change() or True),
        mock.patch(f"{where}.target_fingerprint", return_value=""),
        mock.patch(f"{where}.prepack"),
    ):
        for module in model.modules():
            place_weights(module, gpu)
        base = BaseModel(model, "fake", native=False)
        assert base.allow_packing()
        yield base
