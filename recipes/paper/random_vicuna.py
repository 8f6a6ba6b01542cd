"""A small random model in the layout in which Vicuna is published: pickled shards, and no chat template.

The tests let it go the way that a Vicuna goes. Its tokeniser is the embedded model's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafter.embedded import EMBEDDED_BASE
from pipeline.errors import InputError
from recipes.paper.paper_config import BaseConfig

_SHARDS = 2
_POSITIONS = 512
_SPREAD = 0.3
"""Standard deviation of the weights: larger than usual, so that a text is not one token for ever."""


def write_random_vicuna(folder: Path, base: BaseConfig) -> None:
    """Write the model into a new folder.

    Args:
        folder: Where it goes.
        base: Its sizes.

    Raises:
        InputError: The vocabulary is not the embedded tokeniser's.
    """
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    if base.vocabulary != len(tokenizer):
        raise InputError(f"base.vocabulary of a random base must be {len(tokenizer)}, as its tokeniser's is")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=base.vocabulary,
        hidden_size=base.width,
        intermediate_size=base.intermediate,
        num_hidden_layers=base.layers,
        num_attention_heads=base.heads,
        num_key_value_heads=base.kv_heads,
        max_position_embeddings=_POSITIONS,
        initializer_range=_SPREAD,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.to(torch.float16) for name, tensor in model.state_dict().items()}
    names = list(weights)
    where: dict[str, str] = {}
    for shard in range(_SHARDS):
        file = f"pytorch_model-{shard + 1:05d}-of-{_SHARDS:05d}.bin"
        some = names[shard * len(names) // _SHARDS : (shard + 1) * len(names) // _SHARDS]
        torch.save({name: weights[name] for name in some}, folder / file)
        where |= dict.fromkeys(some, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
