"""A GGUF file becomes a folder that transformers loads: bf16 safetensors, tokeniser, chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import GgufConfig

from drafter.gguf_files import metadata_read_once
from drafter.target_model.architecture import transformers_loading
from drafter.text.tokenizers import load_tokenizer


@metadata_read_once()
def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder.

    Args:
        gguf: The file. Its weights are dequantised in fp32 and rounded to bf16.
        folder: A new folder.
    """
    tokenizer, how = load_tokenizer(gguf), GgufConfig(dequantize=True)
    with transformers_loading():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=how
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
