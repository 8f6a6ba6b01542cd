"""A GGUF file becomes a folder that transformers loads: bf16 safetensors, tokeniser, chat template.

transformers reads the file with the package `gguf`, and brings weights and names into its own order. What it leaves
undone is done here: its model still calls itself quantised, and its tokeniser does not split digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf as gguf_package
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter.target_model.architecture import transformers_loading

_SPLITS_DIGITS = frozenset({"smollm"})
"""Values of `tokenizer.ggml.pre` whose tokenisers take each digit by itself before anything else."""


@contextmanager
def _metadata_read_once() -> Iterator[None]:
    """Let transformers reuse what `gguf` has read of a file.

    It reads 49,152 tokens and as many merges in Python, for five seconds, each for the configuration, the tokeniser and
    the weights, and makes the same table of names for each module.
    """
    reader, names = gguf_package.GGUFReader, gguf_package.get_tensor_name_map
    gguf_package.GGUFReader, gguf_package.get_tensor_name_map = cache(reader), cache(names)
    try:
        yield
    finally:
        gguf_package.GGUFReader, gguf_package.get_tensor_name_map = reader, names


@_metadata_read_once()
def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder.

    Args:
        gguf: The file. Its weights are dequantised in fp32 and rounded to bf16.
        folder: A new folder.
    """
    tokenizer = read_tokenizer(gguf)
    with transformers_loading():
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # A model that was loaded from a GGUF file refuses to be saved; one that was given the same weights does not.
    del config.quantization_config
    config.dtype = torch.bfloat16
    with transformers_loading():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)


def read_tokenizer(gguf: Path) -> Any:
    """Return the tokeniser of a GGUF file, with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _text(gguf_package.GGUFReader(str(gguf)), "tokenizer.ggml.pre") in _SPLITS_DIGITS:
        inner = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    return tokenizer


def _text(reader: Any, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())
